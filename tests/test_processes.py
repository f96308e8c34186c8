"""Child process groups: every way in which one can end, and that nothing of it stays."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_model.errors import Cancelled, DeadlineExceeded, HostError
from tasks.remote.processes import Ended, end_everything, run_child

SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"


Living = Callable[[Path], list[str]]


def run(code: str, tmp_path: Path, *, deadline_s: float = 30.0, events: list[dict[str, Any]] | None = None) -> Ended:
    return run_child(
        [sys.executable, "-c", f"# {tmp_path}\n{code}"],
        env=os.environ,
        cwd=tmp_path,
        log_path=tmp_path / "log",
        deadline_s=deadline_s,
        on_event=(events if events is not None else []).append,
        what="stage x",
    )


def test_json_lines_become_events_and_stderr_becomes_the_log(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    ended = run(
        "import sys; print('{\"event\": \"progress\", \"done\": 1}'); print('rubbish'); print('[1]'); print('oh', file=sys.stderr)",
        tmp_path,
        events=events,
    )
    assert ended.exit_code == 0
    assert events == [{"event": "progress", "done": 1}]
    assert "oh" in (tmp_path / "log").read_text()


def test_exit_code_and_peak_memory_are_reported(tmp_path: Path) -> None:
    ended = run("import time; x = bytearray(200_000_000); time.sleep(0.8); raise SystemExit(7)", tmp_path)
    assert ended.exit_code == 7
    assert 200_000_000 < ended.peak_rss_bytes < 260_000_000


def test_a_killed_child_ends_with_the_signal_and_its_peak(tmp_path: Path) -> None:
    ended = run("import os, time; x = bytearray(100_000_000); time.sleep(0.8); os.kill(os.getpid(), 9)", tmp_path)
    assert ended.exit_code == -signal.SIGKILL
    assert 100_000_000 < ended.peak_rss_bytes < 160_000_000


def test_five_megabytes_on_stderr_do_not_block(tmp_path: Path) -> None:
    assert run("import sys; sys.stderr.write('x' * 5_000_000); print('{}')", tmp_path).exit_code == 0
    assert (tmp_path / "log").stat().st_size == 5_000_000


def test_a_deadline_ends_the_whole_group(tmp_path: Path, living: Living) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="deadline of 1 s"):
        run(SLEEPER + "time.sleep(60)", tmp_path, deadline_s=1)
    assert time.monotonic() - started < 10
    assert living(tmp_path) == []


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, living: Living) -> None:
    with pytest.raises(DeadlineExceeded):
        run(
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); time.sleep(60)",
            tmp_path,
            deadline_s=1,
        )
    assert living(tmp_path) == []


def test_a_closed_answer_does_not_lift_the_deadline(tmp_path: Path, living: Living) -> None:
    with pytest.raises(DeadlineExceeded):
        run("import os, time; os.close(1); time.sleep(60)", tmp_path, deadline_s=1)
    assert living(tmp_path) == []


def test_grandchildren_that_hold_the_answer_open_do_not_hold_us(tmp_path: Path, living: Living) -> None:
    started = time.monotonic()
    assert run(SLEEPER, tmp_path).exit_code == 0
    assert time.monotonic() - started < 10
    assert living(tmp_path) == []


def test_end_everything_ends_children_and_refuses_new_ones(tmp_path: Path, living: Living) -> None:
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            run(SLEEPER + "time.sleep(60)", tmp_path)
        except Cancelled as exc:
            caught.append(exc)

    thread = threading.Thread(target=wait)
    thread.start()
    while not living(tmp_path):
        time.sleep(0.05)
    end_everything()
    thread.join(timeout=20)
    assert len(caught) == 1
    assert living(tmp_path) == []
    with pytest.raises(Cancelled, match="was not started"):
        run("pass", tmp_path)


def test_an_interpreter_that_is_not_there_is_a_host_error(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="could not start /none/python"):
        run_child(
            ["/none/python"],
            env={},
            cwd=tmp_path,
            log_path=tmp_path / "log",
            deadline_s=1,
            on_event=lambda _e: None,
            what="stage x",
        )


def test_an_event_handler_that_fails_ends_the_child(tmp_path: Path, living: Living) -> None:
    def fail(_event: dict[str, Any]) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_child(
            [sys.executable, "-c", "import time; print('{}', flush=True); time.sleep(60)"],
            env=os.environ,
            cwd=tmp_path,
            log_path=tmp_path / "log",
            deadline_s=30,
            on_event=fail,
            what="stage x",
        )
    assert living(tmp_path) == []
