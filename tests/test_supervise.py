"""The supervisor by itself: no runner, only files that appear, change, or do not."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_model.stages import supervise
from dflash_model.stages.process_groups import ProcessIdentity
from dflash_model.stages.supervise import end_run, read_identity, remove_stale_runs

Living = Callable[[Path], list[str]]


class Run:
    """A run directory with orders in it."""

    def __init__(self, directory: Path, interpreter: str, do: str, **orders: Any) -> None:
        self.directory, self.python = directory / "runs" / "r", interpreter
        self.directory.mkdir(parents=True)
        request = {
            "protocol": 1,
            "stage": "replay",
            "key": "k",
            "work_dir": str(directory),
            "inputs": {},
            "parameters": {"do": do},
        }
        self.write("request.json", request)
        self.write("supervise.json", {"python": interpreter, "lease_s": 30, "deadline_s": 60} | orders)

    def write(self, name: str, value: Any) -> None:
        (self.directory / name).write_text(json.dumps(value))

    def command(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [self.python, "-m", "dflash_model.stages.supervise", str(self.directory), *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=self.directory, check=False, timeout=40)

    def start(self) -> ProcessIdentity:
        """The command returns, with its pipes closed, while the run goes on."""
        done = self.command()
        assert done.returncode == 0, done.stderr
        return ProcessIdentity.from_json(json.loads(done.stdout))

    def until_there(self, name: str) -> Path:
        until = time.monotonic() + 20
        while not (self.directory / name).exists():
            assert time.monotonic() < until, f"no {name}"
            time.sleep(0.02)
        return self.directory / name

    def until_said(self, text: str) -> None:
        until = time.monotonic() + 20
        while text not in self.until_there("answers.jsonl").read_text():
            assert time.monotonic() < until, f"nothing of {text}"
            time.sleep(0.02)

    def ending(self) -> dict[str, Any]:
        ending: dict[str, Any] = json.loads(self.until_there("exit.json").read_text())
        return ending


@pytest.fixture
def make(tmp_path: Path, fake_python: str, living: Living) -> Any:
    yield lambda do, **orders: Run(tmp_path, fake_python, do, **orders)
    until = time.monotonic() + 10
    while living(tmp_path):
        assert time.monotonic() < until, living(tmp_path)
        time.sleep(0.05)


def test_it_detaches_and_leaves_how_the_stage_ended(make: Any) -> None:
    run = make("work")
    supervisor = run.start()
    ending = run.ending()
    assert (ending["exit_code"], ending["reason"], ending["left"]) == (0, "itself", [])
    assert ending["peak_rss_bytes"] > 1_000_000
    assert 0 < ending["seconds"] < 30
    events = [json.loads(line)["event"] for line in (run.directory / "answers.jsonl").read_text().splitlines()]
    assert events == ["milestone", "progress", "finished"]
    assert "a library prints" in (run.directory / "log").read_text()
    assert read_identity(run.directory) == supervisor
    assert supervisor.pid != os.getpgrp()


def test_the_stage_is_in_the_group_of_its_supervisor(make: Any, living: Living, tmp_path: Path) -> None:
    run = make("hang")
    supervisor = run.start()
    run.until_said("about to hang")
    assert os.getsid(supervisor.pid) == supervisor.pid
    assert len(living(tmp_path)) >= 2
    os.killpg(supervisor.pid, signal.SIGKILL)


def test_a_stage_whose_supervisor_is_killed_ends_itself_and_its_children(make: Any, living: Living, tmp_path: Path) -> None:
    run = make("hang")
    supervisor = run.start()
    run.until_said("about to hang")
    os.kill(supervisor.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while living(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert "the runner went away" in (run.directory / "log").read_text()
    assert not (run.directory / "exit.json").exists()


def test_starting_twice_is_starting_once(make: Any) -> None:
    run = make("hang")
    first = run.start()
    assert run.start() == first
    run.until_said("about to hang")
    assert end_run(run.directory) == []
    assert run.start() == first, "not even once it has ended"
    assert (run.directory / "answers.jsonl").read_text().count("about to hang") == 1


@pytest.mark.parametrize(("orders", "reason"), [({"lease_s": 0.5}, "lease"), ({"deadline_s": 0.5}, "deadline")])
def test_without_a_runner_lease_and_deadline_end_the_group(
    make: Any, living: Living, tmp_path: Path, orders: dict[str, float], reason: str
) -> None:
    run = make("hang", **orders)
    run.start()
    assert run.ending()["reason"] == reason
    time.sleep(0.3)
    assert living(tmp_path) == []


@pytest.mark.parametrize("renew", ["content", "time"])
def test_a_lease_is_renewed_by_new_content_or_a_new_time(make: Any, renew: str) -> None:
    run = make("hang", lease_s=0.8)
    lease = run.directory / "lease"
    run.start()
    for count in range(5):
        if renew == "content":
            lease.write_text(str(count))
            os.utime(lease, (0, 0))
        else:
            lease.touch()
        time.sleep(0.2)
    assert not (run.directory / "exit.json").exists()
    assert run.ending()["reason"] == "lease"


def test_cancel_ends_the_group(make: Any) -> None:
    run = make("hang")
    run.start()
    run.until_said("about to hang")
    (run.directory / "cancel").touch()
    ending = run.ending()
    assert (ending["reason"], ending["exit_code"]) == ("cancel", 130)


def test_a_run_that_was_cancelled_before_its_start_does_not_start(make: Any) -> None:
    run = make("work")
    assert end_run(run.directory) == []
    run.start()
    ending = run.ending()
    assert (ending["reason"], ending["exit_code"], ending["peak_rss_bytes"]) == ("cancel", None, None)
    assert not (run.directory / "answers.jsonl").exists()


def test_sigterm_to_the_supervisor_ends_the_group_and_is_told(make: Any) -> None:
    run = make("hang")
    supervisor = run.start()
    run.until_said("about to hang")
    os.kill(supervisor.pid, signal.SIGTERM)
    assert run.ending()["reason"] == "signal"


def test_a_run_directory_that_vanishes_ends_the_group(make: Any, living: Living, tmp_path: Path) -> None:
    run = make("hang")
    run.start()
    run.until_said("about to hang")
    run.directory.rename(tmp_path / "elsewhere")
    until = time.monotonic() + 10
    while living(tmp_path) and time.monotonic() < until:
        time.sleep(0.05)
    assert living(tmp_path) == []


def test_a_stage_that_is_killed_is_told_with_its_signal(make: Any) -> None:
    run = make("kill")
    run.start()
    ending = run.ending()
    assert (ending["reason"], ending["exit_code"]) == ("itself", -signal.SIGKILL)
    assert ending["peak_rss_bytes"] > 1_000_000


def test_an_interpreter_that_is_not_there_is_told(make: Any) -> None:
    run = make("work", python="/none/python")
    run.start()
    ending = run.ending()
    assert (ending["reason"], ending["detail"]) == ("start", "No such file or directory")


def test_orders_that_are_not_complete_are_refused_with_a_sentence(make: Any) -> None:
    run = make("work")
    run.write("supervise.json", {"python": "x"})
    done = run.command()
    assert done.returncode == 2
    assert "The orders in" in done.stderr
    assert "lease_s" in done.stderr


def test_the_end_option_ends_the_group_and_says_who_stays(make: Any, living: Living, tmp_path: Path) -> None:
    run = make("hang")
    run.start()
    run.until_said("about to hang")
    done = run.command("--end")
    assert json.loads(done.stdout) == {"left": []}
    assert living(tmp_path) == []
    assert run.ending()["reason"] == "cancel"


def test_a_supervisor_that_does_not_react_is_ended_too(
    make: Any, living: Living, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("hang")
    supervisor = run.start()
    run.until_said("about to hang")
    os.kill(supervisor.pid, signal.SIGSTOP)
    for name, seconds in (("TERM_GRACE_S", 0.3), ("KILL_GRACE_S", 5.0), ("REACTION_S", -5.0)):
        monkeypatch.setattr(supervise, name, seconds)
    assert end_run(run.directory) == []
    assert living(tmp_path) == []


def test_a_stranger_with_the_number_of_a_dead_supervisor_is_left_alone(make: Any) -> None:
    run = make("work")
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    identity = dataclasses.replace(ProcessIdentity.of_this_process(), pid=stranger.pid, start_ticks=1)
    run.write("pid", identity.to_json())
    assert end_run(run.directory) == []
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_only_old_directories_of_dead_runs_are_stale(tmp_path: Path) -> None:
    living_one = ProcessIdentity.of_this_process()
    dead_one = dataclasses.replace(living_one, start_ticks=1)
    for name, age_s, identity in (("old dead", 90_000, dead_one), ("old living", 90_000, living_one), ("new dead", 0, dead_one)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "supervise.json").touch()
        (directory / "pid").write_text(json.dumps(identity.to_json()))
        os.utime(directory, (time.time() - age_s,) * 2)
    remove_stale_runs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new dead", "old living"]


def test_it_loads_no_heavy_package() -> None:
    code = "import sys, dflash_model.stages.supervise; print({'torch', 'numpy', 'asyncio', 'logging'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
