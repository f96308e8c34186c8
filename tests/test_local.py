"""A local host: files, and every way in which a stage program can end."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from dflash_model.errors import Cancelled, DeadlineExceeded, EvalError, InputError, StageError, StageKilled
from dflash_model.stages.protocol import Request
from tasks.remote.host import StageRun
from tasks.remote.local import LocalHost
from tasks.remote.processes import end_everything

Living = Callable[[Path], list[str]]


def run(tmp_path: Path, python: str, do: str, *, deadline_s: float = 60, events: list[dict[str, Any]] | None = None) -> StageRun:
    host = LocalHost("h", tmp_path / "h", threads=1, slots=1, python=python)
    request = Request(
        stage="replay", key=f"replay-{do.replace(' ', '-')}", work_dir=tmp_path / "h", inputs={}, parameters={"do": do}, local={}
    )
    return host.run_stage(
        request, log_path=tmp_path / "log", deadline_s=deadline_s, on_event=(events if events is not None else []).append
    )


def nothing_half_written(tmp_path: Path, living: Living) -> bool:
    """No artifact, no part, no run directory; a killed stage's own part may stay until the next run of the same key."""
    return not list((tmp_path / "h" / "runs").iterdir()) and living(tmp_path) == []


def test_a_stage_that_works_gives_its_artifact_events_and_log(tmp_path: Path, fake_python: str, living: Living) -> None:
    events: list[dict[str, Any]] = []
    ended = run(tmp_path, fake_python, "work", events=events)
    assert (tmp_path / "h" / "artifacts" / ended.manifest.key / "out.txt").read_text() == "work"
    assert [e["event"] for e in events] == ["milestone", "progress", "finished"]
    assert events[-1]["digest"] == ended.manifest.digest
    assert ended.peak_rss_bytes > 1_000_000
    assert "a library prints" in (tmp_path / "log").read_text()
    assert nothing_half_written(tmp_path, living)


def test_a_finished_artifact_is_not_made_again(tmp_path: Path, fake_python: str) -> None:
    run(tmp_path, fake_python, "work")
    events: list[dict[str, Any]] = []
    run(tmp_path, fake_python, "work", events=events)
    assert [e["event"] for e in events] == ["finished"]


@pytest.mark.parametrize(
    ("do", "cls", "problem", "fix"),
    [
        ("input error", InputError, "[h] stage replay: The prompts are wrong.", "Mend them."),
        ("defect", StageError, "[h] stage replay: Stage replay failed with ZeroDivisionError: oops.", "Log: "),
        ("kill", StageKilled, "[h] stage replay was killed by signal 9, probably out of memory; peak memory was", "Log: "),
        ("forget", StageError, "without a complete", ""),
    ],
)
def test_each_failure_is_a_sentence_of_the_right_class(
    tmp_path: Path, fake_python: str, living: Living, do: str, cls: type[EvalError], problem: str, fix: str
) -> None:
    with pytest.raises(cls) as caught:
        run(tmp_path, fake_python, do)
    assert type(caught.value) is cls
    assert problem in caught.value.problem
    assert fix in caught.value.fix
    assert nothing_half_written(tmp_path, living)
    assert not (tmp_path / "h" / "artifacts" / f"replay-{do.replace(' ', '-')}").exists()


def test_a_killed_stage_leaves_a_part_that_the_next_run_removes(tmp_path: Path, fake_python: str) -> None:
    with pytest.raises(StageKilled):
        run(tmp_path, fake_python, "kill")
    with pytest.raises(StageKilled):
        run(tmp_path, fake_python, "kill")
    assert len(list((tmp_path / "h" / "artifacts").iterdir())) == 1


def test_a_deadline_ends_the_stage_and_its_children(tmp_path: Path, fake_python: str, living: Living) -> None:
    with pytest.raises(DeadlineExceeded, match=r"\[h\] stage replay ran past its deadline"):
        run(tmp_path, fake_python, "hang", deadline_s=3)
    assert nothing_half_written(tmp_path, living)


def test_ending_everything_ends_the_stage_and_its_children(tmp_path: Path, fake_python: str, living: Living) -> None:
    caught: list[Cancelled] = []

    def wait() -> None:
        try:
            run(tmp_path, fake_python, "hang")
        except Cancelled as exc:
            caught.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    until = time.monotonic() + 20
    while len(living(tmp_path)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    end_everything()
    thread.join(timeout=20)
    assert len(caught) == 1
    assert nothing_half_written(tmp_path, living)


def test_a_stage_ends_when_its_runner_is_killed(tmp_path: Path, fake_python: str, living: Living) -> None:
    request = Request(stage="replay", key="k", work_dir=tmp_path / "h", inputs={}, parameters={"do": "hang"}, local={})
    (tmp_path / "request.json").write_text(json.dumps(request.to_json()))
    code = (
        "import sys, os; from pathlib import Path; from tasks.remote.processes import run_child\n"
        "run_child([sys.argv[1], '-m', 'dflash_model.stages', 'replay', sys.argv[2], '--parent-pipe'], env=os.environ,"
        " cwd=Path(sys.argv[2]).parent, log_path=Path(sys.argv[2] + '.log'), deadline_s=60, on_event=lambda e: print(e, flush=True), what='x')\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-c", code, fake_python, str(tmp_path / "request.json")],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert runner.stdout is not None
    assert b"about to hang" in runner.stdout.readline()
    assert living(tmp_path)
    os.kill(runner.pid, signal.SIGKILL)
    runner.communicate()
    until = time.monotonic() + 15
    while living(tmp_path) and time.monotonic() < until:
        time.sleep(0.1)
    assert living(tmp_path) == []


def test_slots_are_respected(tmp_path: Path, fake_python: str) -> None:
    host = LocalHost("h", tmp_path / "h", threads=1, slots=1, python=fake_python)
    spans: list[tuple[float, float]] = []

    def one(number: int) -> None:
        request = Request(
            stage="replay", key=f"k{number}", work_dir=tmp_path / "h", inputs={}, parameters={"do": "work"}, local={}
        )
        times: list[float] = []
        host.run_stage(request, log_path=tmp_path / "log", deadline_s=60, on_event=lambda _e: times.append(time.monotonic()))
        spans.append((times[0], times[-1]))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.sort()
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


def test_files_are_found_read_written_and_removed(tmp_path: Path) -> None:
    host = LocalHost("h", tmp_path / "h", threads=1, slots=1)
    path = host.work_dir / "d [1]" / "f*.pt"
    host.write_blocks(path, [b"ab", b"cd"])
    facts = host.stat(path)
    assert facts is not None
    assert (facts.size_bytes, facts.is_dir) == (4, False)
    assert b"".join(host.read_blocks(path)) == b"abcd"
    assert [f.path for f in host.glob("d*/*.pt")] == [path]
    assert host.stat(host.work_dir / "none") is None
    host.rename(path, host.work_dir / "g")
    host.remove(host.work_dir / "g")
    host.remove(host.work_dir / "g")
    assert host.stat(host.work_dir / "g") is None
    with pytest.raises(InputError, match=r"Not found while \[h\] reading"):
        list(host.read_blocks(PurePosixPath("/none/at/all")))
