"""Replays every drafter of the zoo on its held-out prompts; records are kept, so that only what changed is replayed again.

References, hidden states and records lie below build/zoo/replay. The drafter is read from its z-lab directory by the same
readers as any other checkpoint: what it was trained with does not matter here, only what it declares.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from zoo_entries import BUILD, DRAFTERS, PROMPTS, target_directory

from dflash_model.checkpoint.safetensors_file import read_safetensors_header
from dflash_model.checkpoint.source import LocalFile
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.zlab import spec_from_zlab
from dflash_model.replay.engine import Sample, replay
from dflash_model.replay.records import SampleRecords, Sequence
from dflash_model.replay.walk import chain_matched, streak_matched
from dflash_model.storage import write_json
from dflash_model.target.backbone import load_backbone
from dflash_model.target.hidden_states import extract
from dflash_model.target.prompts import load_tokenizer, read_prompts, render
from dflash_model.target.references import Reference, read_references, write_references
from dflash_model.target.stop_tokens import read_stop_ids
from dflash_model.target.tables import Tables, load_tables, write_tables
from dflash_model.training.answers import answer_prompts

log = logging.getLogger("zoo")
STREAKS = (4, 8)
KEPT_CANDIDATES = 16
MAX_NEW_TOKENS = 128


class ReplayedTarget:
    """One target's side of the replay: references, tables, and every layer's states in memory."""

    def __init__(self, table: Mapping[str, Any], target: str) -> None:
        directory = target_directory(table, target)
        self.references = self._references(directory, BUILD / "replay" / f"{target}-references.jsonl")
        with TemporaryDirectory() as scratch:
            write_tables(directory, Path(scratch))
            self.tables: Tables = load_tables(Path(scratch), torch.float32)
        backbone = load_backbone(directory, dtype="float32")
        taps = range(backbone.num_layers + 1)
        self._states = {ref.sample_id: extract(backbone, ref.token_ids, taps).taps for ref in self.references}

    @staticmethod
    def _references(directory: Path, out: Path) -> list[Reference]:
        if not out.is_file():
            out.parent.mkdir(parents=True, exist_ok=True)
            tokenizer = load_tokenizer(directory)
            prompts = render(read_prompts(PROMPTS), tokenizer, thinking=None, max_prompt_tokens=512)
            stops = read_stop_ids(directory, tokenizer)
            backbone = load_backbone(directory, dtype="float32")
            write_references(out, answer_prompts(backbone, prompts, stop_ids=stops, max_new_tokens=MAX_NEW_TOKENS))
        return read_references(out)

    def samples(self, taps: tuple[int, ...]) -> list[Sample]:
        """What the replay engine takes, for a drafter with these taps."""
        return [
            Sample(
                sequence=Sequence(
                    sample_id=reference.sample_id,
                    prompt_length=len(reference.prompt_ids),
                    completion_length=len(reference.completion_ids),
                    overshoot_length=0,
                    stopped=reference.stopped,
                ),
                token_ids=reference.token_ids,
                load_states=partial(self._taps, reference.sample_id, taps),
            )
            for reference in self.references
        ]

    def _taps(self, sample_id: str, taps: tuple[int, ...]) -> Tensor:
        return torch.cat([self._states[sample_id][k] for k in taps], dim=-1)


def replay_drafter(directory: Path, target: ReplayedTarget, out: Path) -> None:
    """Records of one drafter, one file a prompt; the digest file comes last."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    weights = directory / "model.safetensors"
    with LocalFile(weights) as source:
        shapes = {name: entry.shape for name, entry in read_safetensors_header(source, shard=weights.name).entries.items()}
    spec = spec_from_zlab(config, shapes)
    records = replay(
        load_drafter(weights, spec),
        target.samples(spec.tap_indices),
        embedding=target.tables.embed,
        head=target.tables.head,
        walks=[chain_matched, *(partial(streak_matched, width=width) for width in STREAKS)],
        top_k=KEPT_CANDIDATES,
    )
    out.mkdir(parents=True, exist_ok=True)
    for sample in records:
        sample.save(out / f"{sample.sequence.sample_id}.safetensors")
    write_json(out / "digest.json", digest_of(directory))


def digest_of(directory: Path) -> str:
    """Of the drafter's files and the prompts: what records depend on."""
    parts = [(directory / "config.json").read_bytes(), (directory / "model.safetensors").read_bytes(), PROMPTS.read_bytes()]
    return sha256(b"\0".join(sha256(part).digest() for part in parts)).hexdigest()


def read_records(out: Path) -> list[SampleRecords]:
    """All records of one drafter, in the order of their prompts' ids."""
    return [SampleRecords.load(path) for path in sorted(out.glob("*.safetensors"))]


def records_of_all(table: Mapping[str, Any]) -> dict[str, list[SampleRecords]]:
    """Drafter -> records, in the order of names; replays what is missing."""
    targets: dict[str, ReplayedTarget] = {}
    found = {}
    for directory in sorted(path for path in DRAFTERS.iterdir() if (path / "training.json").is_file()):
        out = BUILD / "replay" / directory.name
        kept = out / "digest.json"
        if not kept.is_file() or json.loads(kept.read_text()) != digest_of(directory):
            name = json.loads((directory / "training.json").read_text())["target"]
            if name not in targets:
                targets[name] = ReplayedTarget(table, name)
            log.info("replaying %s", directory.name)
            replay_drafter(directory, targets[name], out)
        found[directory.name] = read_records(out)
    return found
