"""What the options of `dflash-eval run` mean as parameters of an evaluation, and what is said of a finished run."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dflash_model.errors import InputError
from flows.cli import _parser as make_parser
from flows.cli import main
from flows.parameters import EngineStates, HiddenStates
from flows.running import parameters_from_options, print_outcome
from tests.made_up_records import STORED

NEEDED = ("--candidate", "/c.pt", "--target", "/t", "--prompts", "/p.jsonl")


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def _states(tmp_path: Path, *words: str) -> HiddenStates:
    return parameters_from_options(make_parser().parse_args(["run", *NEEDED, *words]), tmp_path).hidden_states


def test_hidden_states_are_extracted_as_there_is_room_unless_told_otherwise(tmp_path: Path) -> None:
    assert _states(tmp_path) == HiddenStates(extraction="auto", max_gpu_memory_gib=None, batch=1, engine=None, thresholds={})
    words = "--extraction streaming --max-gpu-memory 20 --extraction-batch 4 --fidelity fail_agree=0.85 --fidelity few_tokens=50"
    assert _states(tmp_path, *words.split()) == HiddenStates(
        extraction="streaming", max_gpu_memory_gib=20, batch=4, thresholds={"fail_agree": 0.85, "few_tokens": 50}
    )


def test_an_engines_files_need_the_ids_that_it_was_given(tmp_path: Path) -> None:
    found = _states(tmp_path, "--states-from", "vllm:/data/hs", "--engine-layer-ids", "2,17,64").engine
    assert found == EngineStates(engine="vllm", path="/data/hs", layer_ids=[2, 17, 64])
    for words in (("--states-from", "vllm:/data/hs"), ("--engine-layer-ids", "2,17")):
        with pytest.raises(InputError, match="belong together"):
            _states(tmp_path, *words)


def test_wrong_values_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, sentence in (
        (("--extraction", "fast"), "invalid choice: 'fast'"),
        (("--fidelity", "fail_agree"), "'fail_agree' is not like fail_agree=0.85"),
    ):
        with pytest.raises(SystemExit):
            make_parser().parse_args(["run", *NEEDED, *words])
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"--states-from": "tgi:/x", "--engine-layer-ids": "2"}, "Input should be 'vllm' or 'sglang'"),
        ({"--states-from": "vllm:/absent/hs", "--engine-layer-ids": "2"}, "/absent/hs is not a directory"),
        ({"--extraction-batch": "0"}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    tmp_path: Path, changes: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = Path(__file__).resolve().parent.parent / "deployments" / "demo"
    given = {
        "--home": str(tmp_path), "--target": str(demo / "target"), "--prompts": str(demo / "prompts.jsonl"),
        "--candidate": str(demo / "drafters" / "step-00055"),
    }  # fmt: skip
    words = [word for pair in (given | changes).items() for word in pair]
    assert main(["run", *words, "--plan"]) == 2
    assert sentence in capsys.readouterr().err


def outcome(directory: Path) -> str:
    shutil.copyfile(STORED, directory / "result.json")
    run = {
        "run_id": "r",
        "stages": [{"name": "replay", "host": "eval", "state": "ran", "seconds": 1.0}],
        "gate": {"not_applied": []},
    }
    (directory / "run.json").write_text(json.dumps(run))
    console = Console(file=io.StringIO(), width=160)
    print_outcome(console, directory)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_drafters_warnings_stand_below_the_table(tmp_path: Path) -> None:
    said = outcome(tmp_path)
    assert "warning: step-000165: Nothing states the attention masks <of this one>." in said
    assert said.count("warning: ") == 1
    assert said.index("verdict") < said.index("warning: ") < said.index("Stages: 1 ran, 0 Cached.")
