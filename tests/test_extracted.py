"""Adopting what a relay extracted: the very artifact that an extraction on this host makes, or an error."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from dflash_model.checkpoint.extract import extract_weights_from_dir
from dflash_model.checkpoint.extracted import EXTRACTED_NAME, WEIGHTS_NAME, Extracted, adopt_extracted
from dflash_model.errors import EvalError, StorageError
from dflash_model.stages import extract_weights as stage
from dflash_model.stages.protocol import Context, Request
from dflash_model.storage import find_artifact, verify_artifact
from tests.checkpoint_files import drafter_tensors

DEMO = Path(__file__).resolve().parent.parent / "deployments" / "demo" / "drafters" / "step-00055"


def run_stage(work: Path, local: dict[str, Any]) -> Any:
    """The stage's artifact below `work`."""
    parameters = {"source_digest": "d", "form": "directory", "tokenizer_sha256": None}
    request = Request(stage="extract-weights", key="k", work_dir=work, inputs={}, parameters=parameters, local=local)
    with Path(os.devnull).open("wb") as answers:
        stage.run(Context(request=request, kind="checkpoint", answer_descriptor=answers.fileno()))
    verify_artifact(work, "k")
    return find_artifact(work, "k")


def incoming(directory: Path) -> Path:
    """As a relay leaves it."""
    directory.mkdir()
    report = extract_weights_from_dir(DEMO, directory / WEIGHTS_NAME, keep_vocab=True)
    (directory / "config.json").write_bytes((DEMO / "config.json").read_bytes())
    (directory / EXTRACTED_NAME).write_bytes(Extracted(report=report, transfer={"bytes_read": 5}).to_json())
    return directory


def test_an_adopted_artifact_equals_one_extracted_here(tmp_path: Path) -> None:
    here = run_stage(tmp_path / "here", {"path": str(DEMO)})
    moved = run_stage(tmp_path / "there", {"path": str(incoming(tmp_path / "incoming")), "extracted": True})
    assert moved.digest == here.digest
    assert (moved.files, moved.facts) == (here.files, here.facts)
    assert moved.made_by["relay"] == {"bytes_read": 5}


def test_notes_go_through_json_whole(tmp_path: Path) -> None:
    directory = incoming(tmp_path / "incoming")
    text = (directory / EXTRACTED_NAME).read_text()
    found = Extracted.from_json(json.loads(text), where="x")
    assert found.to_json().decode() == text
    assert found.report.prefixes == ()
    assert found.report.tensors > 10
    with pytest.raises(StorageError, match="x is of format 2"):
        Extracted.from_json(json.loads(text) | {"format_version": 2}, where="x")
    for damaged in ({"format_version": 1}, [], None):
        with pytest.raises(StorageError, match="x is damaged"):
            Extracted.from_json(damaged, where="x")


def test_a_byte_that_changed_since_it_arrived_is_caught(tmp_path: Path) -> None:
    directory = incoming(tmp_path / "incoming")
    content = bytearray((directory / WEIGHTS_NAME).read_bytes())
    content[-1] ^= 1
    (directory / WEIGHTS_NAME).write_bytes(content)
    with pytest.raises(StorageError, match=r"model\.safetensors differs from what arrived"):
        adopt_extracted(directory, tmp_path / "out" / WEIGHTS_NAME)
    assert not (tmp_path / "out" / WEIGHTS_NAME).exists()
    assert (directory / WEIGHTS_NAME).exists()


def test_without_notes_nothing_is_taken(tmp_path: Path) -> None:
    save_file(drafter_tensors(), tmp_path / WEIGHTS_NAME)
    with pytest.raises(EvalError):
        adopt_extracted(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
