"""The history: what the directories say, whatever became of the index."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_model.errors import StorageError
from dflash_model.history import INDEX_FILE, evaluations, unreadable
from tests.made_up_evaluations import GROUND, publish_step

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}


def dump(home: Path) -> list[str]:
    index = sqlite3.connect(home / INDEX_FILE)
    lines = list(index.iterdump())
    index.close()
    return lines


def test_a_home_without_runs_has_no_history(tmp_path: Path) -> None:
    assert evaluations(tmp_path / "new") == []


def test_an_evaluation_is_read_with_its_numbers_and_its_ground(tmp_path: Path) -> None:
    directory = publish_step(tmp_path, "night-1", 20)
    result = json.loads((directory / "result.json").read_text())
    (one,) = evaluations(tmp_path)
    assert (one.run_id, one.finished_at, one.prompts) == ("night-1", "2030-01-01T03:00:00+00:00", 12)
    assert one.headline == result["headline"]
    assert one.ground.prompts == GROUND["prompts"]
    reference, candidate = one.drafters
    assert (reference.role, reference.verdict, reference.training_run) == ("reference", None, "train:/ckpt")
    entry = result["drafters"][1]
    assert (candidate.step, candidate.source) == (20, "train:/ckpt/step-00020.pt")
    assert candidate.tau == entry["tau"]["pooled"]
    assert candidate.interval == tuple(entry["tau"]["interval"])
    assert (candidate.verdict, candidate.difference) == (entry["vs_reference"]["verdict"], entry["vs_reference"]["difference"])


def test_evaluations_come_oldest_first_and_latest_is_no_evaluation(tmp_path: Path) -> None:
    publish_step(tmp_path, "b", 10, night=1)
    publish_step(tmp_path, "a", 20, night=2)
    (tmp_path / "runs" / "latest").symlink_to("a")
    (tmp_path / "runs" / "unfinished").mkdir()
    assert [one.run_id for one in evaluations(tmp_path)] == ["b", "a"]


def test_publishing_a_run_again_is_one_entry_with_the_new_numbers(tmp_path: Path) -> None:
    publish_step(tmp_path, "night-1", 10)
    before = evaluations(tmp_path)
    publish_step(tmp_path, "night-1", 30)
    after = evaluations(tmp_path)
    assert len(before) == len(after) == 1
    assert (before[0].drafters[1].step, after[0].drafters[1].step) == (10, 30)


def test_a_run_that_is_gone_leaves_the_history(tmp_path: Path) -> None:
    publish_step(tmp_path, "night-1", 10)
    publish_step(tmp_path, "night-2", 20)
    assert len(evaluations(tmp_path)) == 2
    shutil.rmtree(tmp_path / "runs" / "night-1")
    assert [one.run_id for one in evaluations(tmp_path)] == ["night-2"]


@pytest.mark.parametrize("damage", ["gone", "rubbish", "older", "torn"])
def test_an_index_that_is_lost_is_made_again_equal(tmp_path: Path, damage: str) -> None:
    for night, step in enumerate((10, 20, 30), start=1):
        publish_step(tmp_path, f"night-{night}", step, night=night)
    found, lines = evaluations(tmp_path), dump(tmp_path)
    path = tmp_path / INDEX_FILE
    if damage == "gone":
        path.unlink()
    elif damage == "rubbish":
        path.write_bytes(b"not a database" * 1000)
    elif damage == "older":
        index = sqlite3.connect(path)
        index.executescript("PRAGMA user_version = 0; DROP TABLE drafters; CREATE TABLE drafters (other TEXT);")
        index.close()
    else:
        whole = path.read_bytes()
        path.write_bytes(whole[:4096] + b"\x55" * (len(whole) - 4096))
    assert evaluations(tmp_path) == found
    assert dump(tmp_path) == lines


def test_a_result_that_cannot_be_read_is_said_and_hides_no_other(tmp_path: Path) -> None:
    publish_step(tmp_path, "good", 10)
    for name, content in (("cut", '{"schema_ver'), ("newer", '{"schema_version": 999}'), ("other", '{"schema_version": 1}')):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "result.json").write_text(content)
    assert [one.run_id for one in evaluations(tmp_path)] == ["good"]
    problems = unreadable(tmp_path)
    assert list(problems) == ["cut", "newer", "other"]
    assert "is not JSON" in problems["cut"]
    assert "schema_version" in problems["newer"]
    assert "lacks what history needs" in problems["other"]
    (tmp_path / "runs" / "cut" / "result.json").write_text((tmp_path / "runs" / "good" / "result.json").read_text())
    assert [one.run_id for one in evaluations(tmp_path)] == ["cut", "good"]
    assert list(unreadable(tmp_path)) == ["newer", "other"]


def test_a_home_that_is_no_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).mkdir()
    with pytest.raises(StorageError, match="cannot be used"):
        evaluations(tmp_path)


WRITER = """
import sys
from pathlib import Path
from dflash_model.history import evaluations
home, names = Path(sys.argv[1]), sys.argv[2:]
for name in names:
    (home / "staged" / name).rename(home / "runs" / name)
    assert name in [one.run_id for one in evaluations(home)]
"""


def test_evaluations_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    names = [f"run-{number:02d}" for number in range(12)]
    for number, name in enumerate(names):
        publish_step(tmp_path, name, 10 + 10 * (number % 3))
    (tmp_path / "runs").rename(tmp_path / "staged")
    (tmp_path / "runs").mkdir()
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), *names[first::2]], env=ENV) for first in (0, 1)]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    index = sqlite3.connect(tmp_path / INDEX_FILE)
    entered = [row[0] for row in index.execute("SELECT run_id FROM evaluations ORDER BY run_id")]
    index.close()
    assert entered == names


def test_a_writer_killed_in_its_transaction_leaves_one_entry_once_published_again(tmp_path: Path) -> None:
    publish_step(tmp_path, "night-1", 10)
    program = (
        "import os, signal, sys; from pathlib import Path; import dflash_model.history as history\n"
        "real = history._enter\n"
        "def enter(*args):\n    real(*args)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "history._enter = enter\nhistory.evaluations(Path(sys.argv[1]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=ENV)
    assert killed.returncode == -signal.SIGKILL
    publish_step(tmp_path, "night-1", 10)
    assert [one.run_id for one in evaluations(tmp_path)] == ["night-1"]
