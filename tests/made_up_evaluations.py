"""Directories of finished evaluations, as publishing leaves them, with made-up numbers."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_model.comparison import Rules
from dflash_model.replay.records import SampleRecords
from dflash_model.result import CANDIDATE, REFERENCE, DrafterRecords, build_result
from tests.made_up_records import made_up_records, made_up_spec

GROUND = {
    "target": "f" * 64,
    "prompts": "1" * 64,
    "template": "2" * 64,
    "references": "3" * 64,
    "tail": "truncated",
    "fidelity": "PASS",
}
REFERENCE_RECORDS = made_up_records(2, sharpness=3.2, late=0.3, prompts=12)
SHARPNESS = {10: 2.6, 20: 3.0, 30: 3.6}
"""Training step -> how good the made-up checkpoint is."""


@functools.cache
def checkpoint_records(step: int, *, prompts: int = 12) -> list[SampleRecords]:
    """Records of the checkpoint of `step`."""
    return made_up_records(step, sharpness=SHARPNESS[step], late=0.3, prompts=prompts)


def made_up_evaluation(
    records: Mapping[str, list[SampleRecords]],
    *,
    steps: Mapping[str, int] | None = None,
    reference: list[SampleRecords] | None = REFERENCE_RECORDS,
    **ground: str,
) -> dict[str, Any]:
    """A result.json of candidates against `reference`, on GROUND with changes."""
    chosen = GROUND | ground
    drafters = [
        DrafterRecords(
            name=name,
            role=CANDIDATE,
            step=(steps or {}).get(name),
            digest=f"{number + 1:064x}" if steps is None else f"{steps.get(name, 0):064x}",
            spec=made_up_spec(),
            records=one,
        )
        for number, (name, one) in enumerate(records.items())
    ]
    if reference is not None:
        first = DrafterRecords(name="release", role=REFERENCE, step=None, digest="a" * 64, spec=made_up_spec(), records=reference)
        drafters.insert(0, first)
    return build_result(
        drafters=drafters,
        categories={},
        prompts_facts={
            "count": len(drafters[0].records),
            "digest": chosen["prompts"],
            "categories": {},
            "template_digest": chosen["template"],
            "references_digest": chosen["references"],
        },
        target_facts={"fingerprint": chosen["target"]},
        fidelity=None if chosen["fidelity"] == "-" else {"verdict": chosen["fidelity"]},
        tail=chosen["tail"],
        rules=Rules(resamples=199),
    )


def publish_made_up(
    home: Path,
    run_id: str,
    result: dict[str, Any],
    *,
    finished_at: str = "2030-01-01T03:00:00+00:00",
    training: str = "train:/ckpt",
) -> Path:
    """Write `result` as the evaluation `run_id` below `home`; its candidates lie in the directory `training` (host:path)."""
    directory = home / "runs" / run_id
    directory.mkdir(parents=True, exist_ok=True)
    host, _, folder = training.partition(":")
    sources = [{"host": host, "path": f"{folder}/{entry['name']}.pt"} for entry in result["drafters"]]
    (directory / "run.json").write_text(json.dumps({"run_id": run_id, "finished_at": finished_at, "sources": sources}))
    (directory / "result.json").write_text(json.dumps(result))
    return directory


def publish_step(home: Path, run_id: str, step: int, *, night: int = 1, **ground: str) -> Path:
    """The evaluation of one checkpoint against the release, on GROUND with changes."""
    return publish_made_up(home, run_id, step_evaluation(step, **ground), finished_at=f"2030-01-{night:02d}T03:00:00+00:00")


@functools.cache
def step_evaluation(step: int, **ground: str) -> dict[str, Any]:
    """result.json of one checkpoint against the release, on GROUND with changes."""
    name = f"step-{step:05d}"
    return made_up_evaluation({name: checkpoint_records(step)}, steps={name: step}, **ground)
