"""Stage compare: from the records of all drafters to result.json. No torch: records are arrays, metrics are functions of them.

Parameters: drafters [{name, role, step, facts of the checkpoint}], fidelity, tail, equal_within, stride. Inputs: prompts, target,
references, and `replay-<drafter>-<shard>` for every shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from dflash_model.comparison import Rules
from dflash_model.errors import StageError
from dflash_model.reference_checks import reference_section
from dflash_model.replay.records import SampleRecords
from dflash_model.result import DrafterRecords, build_result
from dflash_model.stages.protocol import Context
from dflash_model.storage import write_json
from dflash_model.target.prompt_labels import prompt_labels
from dflash_model.target.references import read_references

PROMPTS_FILE, RESULT_FILE = "prompts.jsonl", "result.json"
TARGET_FACTS = ("fingerprint", "model_type", "num_layers", "hidden_size", "vocab_size")


def run(context: Context) -> None:
    """Load all records, compare, write result.json."""
    chosen = context.parameters
    references = context.input_manifest("references")
    prompts = context.input_manifest("prompts")
    target = context.input_manifest("target").facts
    categories = {sample: category for sample, category in references.facts["categories"].items() if category is not None}
    drafters = [_drafter(context, number, row) for number, row in enumerate(chosen["drafters"])]
    _check_complete(drafters, set(references.facts["categories"]))
    result = build_result(
        drafters=drafters,
        categories=categories,
        prompts_facts={
            "count": references.facts["count"],
            "digest": prompts.digest,
            "categories": dict(sorted(Counter(categories.values()).items())),
            "template_digest": references.facts["template_digest"],
            "references_digest": references.digest,
            "finishes": references.facts["finishes"],
        },
        target_facts={name: target[name] for name in TARGET_FACTS},
        fidelity=chosen["fidelity"],
        tail=chosen["tail"],
        rules=Rules(equal_within=chosen["equal_within"]),
        stride=chosen.get("stride"),
        target_logprobs=_target_logprobs(context),
        labels=prompt_labels(context.input_path("prompts") / PROMPTS_FILE),
    )
    made = read_references(context.input_path("references") / "references.jsonl")
    result["references"] = reference_section(made, references.facts, result["drafters"])
    with context.writing() as writer:
        write_json(writer.path / RESULT_FILE, result)
        writer.facts |= {"headline": result["headline"]}
    context.milestone(result["headline"])


def _target_logprobs(context: Context) -> dict[str, tuple[float, ...]]:
    """Of the completions whose maker told them."""
    references = read_references(context.input_path("references") / "references.jsonl")
    return {reference.sample_id: reference.logprobs for reference in references if reference.logprobs is not None}


def _drafter(context: Context, number: int, row: dict[str, Any]) -> DrafterRecords:
    return DrafterRecords(
        name=row["name"],
        role=row["role"],
        step=row["step"] if row["step"] is not None else row["facts"]["step"],
        digest=row["facts"]["source_digest"],
        spec=row["facts"]["spec"],
        records=list(_records(context, number)),
        warnings=tuple(dict.fromkeys([*row["facts"].get("warnings", ()), *_replay_warnings(context, number)])),
    )


def _replay_warnings(context: Context, number: int) -> Iterator[str]:
    for role in sorted(context.request.inputs):
        if role.startswith(f"replay-{number}-"):
            yield from context.input_manifest(role).facts.get("warnings", ())


def _records(context: Context, number: int) -> Iterator[SampleRecords]:
    for role in sorted(context.request.inputs):
        if role.startswith(f"replay-{number}-"):
            for path in sorted((context.input_path(role) / "records").glob("*.safetensors")):
                yield SampleRecords.load(path)


def _check_complete(drafters: list[DrafterRecords], wanted: set[str]) -> None:
    for drafter in drafters:
        have = {records.sequence.sample_id for records in drafter.records}
        if have != wanted:
            raise StageError(
                f"The replay of {drafter.name} has records of {len(have)} prompts, expected {len(wanted)}.",
                "Run the replay again.",
            )
