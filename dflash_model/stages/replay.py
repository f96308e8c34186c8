"""Stage replay: one drafter over one shard of the samples; one records file a sample.

Parameters: shard [index, count], tail, streak_widths, tree_budgets, kept_candidates; optional: stride (also every so-many-th
anchor), block_size (fewer rows a block than the drafter was trained with: computed so, not cut), max_new_tokens (of the
references; tail `pypi` shortens blocks before that limit). Inputs: checkpoint, states, references, tables.

Anchors that an earlier replay on this host computed are taken from `samples/`, where every finished sample is kept at once:
a killed replay goes on where it was, and other walks, tails or strides add only their own anchors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dflash_model.ddtree import ddtree_matched
from dflash_model.digests import json_digest
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.mask_row import mask_warnings
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import InputError, StorageError
from dflash_model.replay.engine import Sample, replay
from dflash_model.replay.kept import KeptRecords
from dflash_model.replay.records import SampleRecords, Sequence
from dflash_model.replay.walk import PYPI, Matcher, chain_matched, streak_matched
from dflash_model.stages.protocol import Context
from dflash_model.stages.registry import STAGES
from dflash_model.storage import artifacts_dir, write_json
from dflash_model.target.references import Reference, read_references
from dflash_model.target.states_file import read_states, select_taps
from dflash_model.target.tables import load_tables

log = logging.getLogger(__name__)
WEIGHTS_FILE = "model.safetensors"
RECORDS_DIR = "records"
KEPT_DIR = "samples"


def run(context: Context) -> None:
    """Replay the shard; write records in the order of the references."""
    chosen = context.parameters
    checkpoint = context.input_manifest("checkpoint")
    spec = spec_of_replay(DrafterSpec.from_json(checkpoint.facts["spec"]), chosen.get("block_size"))
    drafter = load_drafter(context.input_path("checkpoint") / WEIGHTS_FILE, spec)
    tables = load_tables(context.input_path("tables"), torch.float32)
    samples, keeper = _samples(context, spec)
    own = drafter.tables(tables.embed, tables.head)
    warnings = mask_warnings(spec, own.mask_row, own.embedding, stop_ids=_stop_ids(samples))
    records = replay(
        drafter,
        samples,
        embedding=tables.embed,
        head=tables.head,
        walks=matchers(chosen["streak_widths"], () if spec.conditional else chosen["tree_budgets"]),
        top_k=chosen["kept_candidates"],
        tail=chosen["tail"],
        stride=chosen.get("stride"),
        every_tail=chosen["tail"] != PYPI,
        on_progress=lambda done, _anchors: context.progress(done, len(samples), "prompts"),
        on_sample=keeper.keep,
    )
    with context.writing() as writer:
        (writer.path / RECORDS_DIR).mkdir()
        numbers = {sample.sequence.sample_id: number for number, sample in enumerate(samples)}
        anchors, near_ties = 0, 0
        for sample_records in records:
            number = numbers[sample_records.sequence.sample_id]
            sample_records.save(writer.path / RECORDS_DIR / f"{number:06d}.safetensors")
            anchors += len(sample_records.anchors)
            near_ties += sample_records.near_ties or 0
        write_json(writer.path / "samples.json", [sample.sequence.sample_id for sample in samples])
        writer.facts |= {"drafter": checkpoint.digest, "samples": len(samples), "anchors": anchors, "shard": chosen["shard"]}
        writer.facts["warnings"] = warnings
        writer.facts |= {"near_ties": near_ties, "block_size": spec.block_size}
        writer.made_by |= {"computed_anchors": keeper.computed, "reused_anchors": max(0, anchors - keeper.computed)}
        writer.made_by |= {"threads": torch.get_num_threads()}
    context.milestone(f"{anchors} anchors, {keeper.computed} of them computed now, {near_ties} near ties")


def _stop_ids(samples: Seq[Sample]) -> set[int]:
    """The tokens that ended the target's answers."""
    ends = ((one, one.sequence.prompt_length + one.sequence.completion_length - 1) for one in samples if one.sequence.stopped)
    return {one.token_ids[last] for one, last in ends}


def spec_of_replay(spec: DrafterSpec, block_size: int | None) -> DrafterSpec:
    """`spec`, or the same drafter with smaller blocks, which drafts other tokens. Raises InputError for a size it cannot have."""
    if block_size is None or block_size == spec.block_size:
        return spec
    if not 2 - spec.shift <= block_size < spec.block_size:
        raise InputError(
            f"Block size {block_size} was asked for, but the drafter was trained with {spec.block_size}.",
            f"Ask for {2 - spec.shift} to {spec.block_size - 1}, or leave it out.",
        )
    return replace(spec, block_size=block_size)


class _Keeper:
    """Keeps each finished sample's records where the next replay looks for them."""

    def __init__(self, kept: KeptRecords) -> None:
        self._kept = kept
        self._paths: dict[str, Path] = {}
        self.computed = 0

    def expect(self, sequence: Sequence, token_ids: Seq[int], states: Seq[str]) -> None:
        """Note where this sequence's records belong."""
        self._paths[sequence.sample_id] = self._kept.path(sequence, token_ids, states)

    def known(self, sequence: Sequence) -> SampleRecords | None:
        """What is there already."""
        return self._kept.load(self._paths[sequence.sample_id], sequence)

    def keep(self, records: SampleRecords, computed: int) -> None:
        """Keep one sample's records, unless none of them is new."""
        self.computed += computed
        if computed:
            self._kept.save(self._paths[records.sequence.sample_id], records)


def matchers(streak_widths: Seq[int], tree_budgets: Seq[int]) -> list[Matcher]:
    """The walks of a replay: the chain, a streak a width, a tree a budget."""
    streaks: list[Matcher] = [functools.partial(streak_matched, width=width) for width in streak_widths]
    trees: list[Matcher] = [functools.partial(ddtree_matched, budget=budget) for budget in tree_budgets]
    return [chain_matched, *streaks, *trees]


def _samples(context: Context, spec: DrafterSpec) -> tuple[list[Sample], _Keeper]:
    """Every count-th reference from index on: categories that follow each other are spread over all shards."""
    chosen, states = context.parameters, context.input_manifest("states")
    index, count = chosen["shard"]
    references = read_references(context.input_path("references") / "references.jsonl")[index::count]
    parts: dict[str, Any] = states.facts["samples"]
    root = artifacts_dir(context.request.work_dir)
    origin = {role: context.input_manifest(role).digest for role in ("checkpoint", "tables")}
    shared = [STAGES["replay"].version, origin, spec.block_size, chosen["kept_candidates"]]
    keeper = _Keeper(KeptRecords(directory=context.request.work_dir / KEPT_DIR, origin=json_digest(shared)))
    samples = []
    for reference in references:
        sequence = Sequence(
            sample_id=reference.sample_id,
            prompt_length=len(reference.prompt_ids),
            completion_length=len(reference.completion_ids),
            overshoot_length=len(reference.overshoot_ids),
            stopped=reference.stopped,
        )
        keys = parts[reference.sample_id]
        token_ids = reference.token_ids + reference.overshoot_ids
        keeper.expect(sequence, token_ids, [states.parts[key] for key in keys])
        limit = chosen.get("max_new_tokens")
        samples.append(
            Sample(
                sequence=sequence,
                token_ids=token_ids,
                load_states=functools.partial(_load_states, root, keys, reference, spec.tap_indices),
                limit=None if limit is None else sequence.prompt_length + limit,
                load_known=functools.partial(_nothing if context.local.get("fresh") else keeper.known, sequence),
            )
        )
    return samples, keeper


def _nothing(_sequence: Sequence) -> None:
    """What is known where all is to be done anew."""


def _load_states(root: Path, keys: Seq[str], reference: Reference, taps: Seq[int]) -> torch.Tensor:
    """[N, T * H] float32: this sample's states at the drafter's taps. Raises StorageError where they are of other tokens."""
    files = [read_states(root / key / "states.safetensors") for key in keys]
    if any(file.token_digest != reference.token_digest for file in files):
        raise StorageError(
            f"The hidden states of {reference.sample_id} are of other tokens than its reference.",
            "Run the hidden_states stage again.",
        )
    return select_taps(files, taps).float()
