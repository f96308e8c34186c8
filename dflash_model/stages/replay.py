"""Stage replay: one drafter over one shard of the samples; one records file a sample.

Parameters: shard [index, count], tail, streak_widths, tree_budgets, kept_candidates. Inputs: checkpoint, states,
references, tables.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from dflash_model.ddtree import ddtree_matched
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.mask_row import mask_warnings
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import StorageError
from dflash_model.replay.engine import Sample, replay
from dflash_model.replay.records import Sequence
from dflash_model.replay.walk import Matcher, chain_matched, streak_matched
from dflash_model.stages.protocol import Context
from dflash_model.storage import artifacts_dir, write_json
from dflash_model.target.references import Reference, read_references
from dflash_model.target.states_file import read_states, select_taps
from dflash_model.target.tables import load_tables

WEIGHTS_FILE = "model.safetensors"
RECORDS_DIR = "records"


def run(context: Context) -> None:
    """Replay the shard; write records in the order of the references."""
    checkpoint = context.input_manifest("checkpoint")
    spec = DrafterSpec.from_json(checkpoint.facts["spec"])
    drafter = load_drafter(context.input_path("checkpoint") / WEIGHTS_FILE, spec)
    tables = load_tables(context.input_path("tables"), torch.float32)
    samples = _samples(context, spec)
    own = drafter.tables(tables.embed, tables.head)
    warnings = mask_warnings(spec, own.mask_row, own.embedding, stop_ids=_stop_ids(samples))
    chosen = context.parameters
    records = replay(
        drafter,
        samples,
        embedding=tables.embed,
        head=tables.head,
        walks=matchers(chosen["streak_widths"], () if spec.conditional else chosen["tree_budgets"]),
        top_k=chosen["kept_candidates"],
        tail=chosen["tail"],
        on_progress=lambda done, _anchors: context.progress(done, len(samples), "prompts"),
    )
    with context.writing() as writer:
        (writer.path / RECORDS_DIR).mkdir()
        numbers = {sample.sequence.sample_id: number for number, sample in enumerate(samples)}
        anchors = 0
        for sample_records in records:
            number = numbers[sample_records.sequence.sample_id]
            sample_records.save(writer.path / RECORDS_DIR / f"{number:06d}.safetensors")
            anchors += len(sample_records.anchors)
        write_json(writer.path / "samples.json", [sample.sequence.sample_id for sample in samples])
        writer.facts |= {"drafter": checkpoint.digest, "samples": len(samples), "anchors": anchors, "shard": chosen["shard"]}
        writer.facts["warnings"] = warnings


def _stop_ids(samples: Seq[Sample]) -> set[int]:
    """The tokens that ended the target's answers."""
    ends = ((one, one.sequence.prompt_length + one.sequence.completion_length - 1) for one in samples if one.sequence.stopped)
    return {one.token_ids[last] for one, last in ends}


def matchers(streak_widths: Seq[int], tree_budgets: Seq[int]) -> list[Matcher]:
    """The walks of a replay: the chain, a streak a width, a tree a budget."""
    streaks: list[Matcher] = [functools.partial(streak_matched, width=width) for width in streak_widths]
    trees: list[Matcher] = [functools.partial(ddtree_matched, budget=budget) for budget in tree_budgets]
    return [chain_matched, *streaks, *trees]


def _samples(context: Context, spec: DrafterSpec) -> list[Sample]:
    """Every count-th reference from index on: categories that follow each other are spread over all shards."""
    index, count = context.parameters["shard"]
    references = read_references(context.input_path("references") / "references.jsonl")[index::count]
    parts: dict[str, Any] = context.input_manifest("states").facts["samples"]
    root = artifacts_dir(context.request.work_dir)
    return [
        Sample(
            sequence=Sequence(
                sample_id=reference.sample_id,
                prompt_length=len(reference.prompt_ids),
                completion_length=len(reference.completion_ids),
                overshoot_length=len(reference.overshoot_ids),
                stopped=reference.stopped,
            ),
            token_ids=reference.token_ids + reference.overshoot_ids,
            load_states=functools.partial(_load_states, root, parts[reference.sample_id], reference, spec.tap_indices),
        )
        for reference in references
    ]


def _load_states(root: Path, keys: Seq[str], reference: Reference, taps: Seq[int]) -> torch.Tensor:
    """[N, T * H] float32: this sample's states at the drafter's taps. Raises StorageError where they are of other tokens."""
    files = [read_states(root / key / "states.safetensors") for key in keys]
    if any(file.token_digest != reference.token_digest for file in files):
        raise StorageError(
            f"The hidden states of {reference.sample_id} are of other tokens than its reference.",
            "Run the hidden_states stage again.",
        )
    return select_taps(files, taps).float()
