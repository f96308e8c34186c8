"""Stage compare: a drafter's warnings come from its extraction and from every shard of its replay, each once."""

import os
from pathlib import Path

from dflash_model.stages.compare import _drafter
from dflash_model.stages.protocol import Context, Request
from dflash_model.storage import writing_artifact
from tests.made_up_records import made_up_spec

STATED = "Nothing states the attention masks."
ZERO = "mask_embedding is nearly zero."


def context(work_dir: Path, shards: dict[str, list[str] | None]) -> Context:
    for key, warnings in shards.items():
        with writing_artifact(work_dir, kind="replay", key=key) as writer:
            (writer.path / "records").mkdir()
            (writer.path / "samples.json").write_text("[]")
            writer.facts |= {} if warnings is None else {"warnings": warnings}
    inputs = {f"replay-0-{number}": key for number, key in enumerate(shards)}
    request = Request(stage="compare", key="compare", work_dir=work_dir, inputs=inputs, parameters={}, local={})
    return Context(request=request, kind="comparison", answer_descriptor=os.open(os.devnull, os.O_WRONLY))


def warnings(work_dir: Path, extraction: list[str] | None, shards: dict[str, list[str] | None]) -> tuple[str, ...]:
    facts = {"step": 7, "source_digest": "d", "spec": made_up_spec()} | ({} if extraction is None else {"warnings": extraction})
    given = context(work_dir, shards)
    try:
        return tuple(_drafter(given, 0, {"name": "a", "role": "candidate", "step": None, "facts": facts}).warnings)
    finally:
        os.close(given.answer_descriptor)


def test_warnings_of_both_come_once_and_in_order(tmp_path: Path) -> None:
    assert warnings(tmp_path, [STATED], {"replay-a": [ZERO], "replay-b": [ZERO]}) == (STATED, ZERO)


def test_artifacts_of_older_versions_have_none(tmp_path: Path) -> None:
    assert warnings(tmp_path, None, {"replay-a": None}) == ()
