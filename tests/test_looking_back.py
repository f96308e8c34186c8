"""`history`, `trend`, `compare` and `schema` as a person calls them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_model.result import result_schema
from flows.cli import main
from tests.made_up_evaluations import checkpoint_records, made_up_evaluation, publish_made_up, publish_step

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "200")
    publish_step(tmp_path, "monday", 10, night=1)
    publish_step(tmp_path, "tuesday", 30, night=2)
    publish_step(tmp_path, "zlab", 20, night=3, tail="zlab")
    publish_step(tmp_path, "doubtful", 30, night=4, fidelity="WARN")
    publish_step(tmp_path, "wednesday", 20, night=5)
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(arguments) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_history_shows_the_newest_first_and_which_may_be_compared(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "history", "--home", str(home))
    assert [line.split()[2] for line in text.splitlines() if line.startswith("2030")] == [
        "wednesday",
        "doubtful",
        "zlab",
        "tuesday",
        "monday",
    ]
    assert [line.split()[-1] for line in text.splitlines() if line.startswith("2030")] == ["A", "B", "C", "A", "A"]
    assert "ground B: fidelity WARN, not PASS; not comparable with A" in text
    assert "ground C: tail rule zlab, not truncated; not comparable with A" in text
    assert "3 more; --limit shows them." in said(capsys, "history", "--home", str(home), "--limit", "2")


def test_history_names_what_it_leaves_out_and_an_empty_home(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "runs" / "monday" / "result.json").write_text("{")
    assert "left out: monday: " in said(capsys, "history", "--home", str(home))
    assert "There is no finished evaluation" in said(capsys, "history", "--home", str(home / "other"))


def test_trend_marks_the_best_and_says_what_it_leaves_out(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "trend", "--home", str(home))
    rows = [line.split() for line in text.splitlines() if "step-" in line]
    assert [row[0] for row in rows] == ["10", "20", "30"]
    assert ["best" in row for row in rows] == [False, False, True]
    assert "left out: 1 evaluation with tail rule zlab, not truncated" in text
    data = json.loads(said(capsys, "trend", "train:/ckpt/", "--home", str(home), "--json"))
    assert [point["drafter"]["step"] for point in data["points"]] == [10, 20, 30]
    assert "Name one of: train:/ckpt" in said(capsys, "trend", "train:/none", "--home", str(home), code=2)


def test_compare_reads_two_finished_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "compare", "tuesday", "monday", "--home", str(home))
    assert text.startswith("step-00030 is better than step-00010: pooled tau ")
    data = json.loads(said(capsys, "compare", "monday", "tuesday:release", "--home", str(home), "--json"))
    stored = json.loads((home / "runs" / "monday" / "result.json").read_text())["drafters"][1]["vs_reference"]
    assert (data["verdict"], data["prompts"]) == ("worse", 12)
    assert data["difference"] == pytest.approx(stored["difference"], abs=1e-6)
    assert "Mind: doubtful has fidelity WARN, not PASS." in said(capsys, "compare", "monday", "doubtful", "--home", str(home))


def test_compare_refuses_other_ground_unknown_runs_and_drafters(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "zlab has tail rule zlab, not truncated" in said(capsys, "compare", "monday", "zlab", "--home", str(home), code=2)
    assert "There is no run sunday" in said(capsys, "compare", "monday", "sunday", "--home", str(home), code=2)
    assert "Drafters: release, step-00010" in said(capsys, "compare", "monday:x", "tuesday", "--home", str(home), code=2)
    two = made_up_evaluation({"a": checkpoint_records(10), "b": checkpoint_records(30)})
    publish_made_up(home, "two", two)
    assert "There are several candidates" in said(capsys, "compare", "two", "monday", "--home", str(home), code=2)
    assert "b is better than a" in said(capsys, "compare", "two:b", "two:a", "--home", str(home))


def test_schema_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, "schema")) == result_schema()


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m flows.cli schema | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")
