"""Stage programs over a link that fails: every way in which they and the link can end, and that nothing of them stays.

All processes are real; the link is LocalShell. A lease is long unless a test is about its end.
"""

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from dflash_model.errors import (
    Cancelled,
    DeadlineExceeded,
    EvalError,
    HostError,
    InputError,
    StageError,
    StageKilled,
    StorageError,
)
from dflash_model.stages.protocol import Request
from tasks.remote import patience
from tasks.remote.code import CodeArchive, pack_code
from tasks.remote.host import StageRun
from tasks.remote.processes import end_everything
from tasks.remote.remote_runner import RemoteRunner
from tests.local_shell import LocalShell

Living = Callable[[Path], list[str]]
Event = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent


class Bench:
    """A host in a directory, a runner for it, and what was heard of its stages."""

    def __init__(self, directory: Path, python: str) -> None:
        self.directory, self.python = directory, python
        self.work_dir = directory / 'a host\'s "work" dir $HOME'
        self.shell = LocalShell()
        self.log_path = directory / "relay" / "log"
        self.events: list[Event] = []

    def runner(self, **settings: Any) -> RemoteRunner:
        defaults: dict[str, Any] = {"threads": 1, "slots": 1, "lease_s": 30.0, "grace_s": 20.0, "poll_s": 0.05}
        return RemoteRunner(
            self.shell,
            work_dir=PurePosixPath(self.work_dir),
            python=self.python,
            code=pack_code(),
            **(defaults | settings),
        )

    def request(self, do: str, **parameters: Any) -> Request:
        key = f"replay-{do.replace(' ', '-')}{parameters.pop('number', '')}"
        return Request(stage="replay", key=key, work_dir=self.work_dir, inputs={}, parameters={"do": do, **parameters}, local={})

    def run(self, do: str, *, runner: RemoteRunner | None = None, deadline_s: float = 60, **parameters: Any) -> StageRun:
        return (runner or self.runner()).run(
            self.request(do, **parameters), log_path=self.log_path, deadline_s=deadline_s, on_event=self.hear
        )

    def hear(self, event: Event) -> None:
        self.events.append(event)

    def behind(self, do: str, **options: Any) -> "Behind":
        return Behind(lambda: self.run(do, **options))

    @property
    def numbers(self) -> list[int]:
        return [event["number"] for event in self.events if event["event"] == "counted"]

    def supervisor(self) -> int:
        """Process number of the one supervisor that was started."""
        (path,) = wait_for(lambda: list(self.work_dir.glob("runs/*/pid")))
        return int(json.loads(path.read_text())["pid"])

    def run_dirs(self) -> list[Path]:
        return list(self.work_dir.glob("runs/*"))


class Behind:
    """A call in a thread, its answer or error."""

    def __init__(self, call: Callable[[], StageRun]) -> None:
        self.answer: StageRun | None = None
        self.error: EvalError | None = None
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def _run(self, call: Callable[[], StageRun]) -> None:
        try:
            self.answer = call()
        except EvalError as exc:
            self.error = exc

    def wait(self) -> "Behind":
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()
        return self


def wait_for(condition: Callable[[], Any], *, seconds: float = 20) -> Any:
    """The first true answer of `condition`."""
    until = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return answer


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Its interpreter finds dflash_model only where it is told to look."""
    python = tmp_path / "python"
    script = ROOT / "tests" / "fake_stage_interpreter.py"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exec "{sys.executable}" "$@"\nexec "{sys.executable}" "{script}" "$@"\n')
    python.chmod(0o755)
    return Bench(tmp_path, str(python))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LONGEST_PAUSE_S", 0.4)


@pytest.fixture(autouse=True)
def _nothing_stays(bench: Bench, living: Living) -> Any:
    yield
    wait_for(lambda: living(bench.directory) == [])


def test_a_stage_that_works_gives_its_artifact_events_and_log(bench: Bench) -> None:
    ended = bench.run("work")
    assert (bench.work_dir / "artifacts" / ended.manifest.key / "out.txt").read_text() == "work"
    assert [event["event"] for event in bench.events] == ["milestone", "progress", "finished"]
    assert bench.events[-1]["digest"] == ended.manifest.digest
    assert ended.peak_rss_bytes > 1_000_000
    assert 0 < ended.seconds < 30
    assert "a library prints" in bench.log_path.read_text()
    assert bench.run_dirs() == []


def test_the_shipped_code_runs_and_is_shipped_once(bench: Bench) -> None:
    code_dir = bench.work_dir / "code" / pack_code().digest
    for number in range(2):
        bench.run("tell where", number=number)
    places = [event["message"] for event in bench.events if event["event"] == "milestone" and "about to" not in event["message"]]
    assert places == [str(code_dir / "dflash_model" / "errors.py")] * 2
    assert [path.name for path in bench.shell.written].count("request.json") == 2
    assert sum(".zip.part-" in path.name for path in bench.shell.written) == 1
    assert [path.name for path in code_dir.parent.iterdir()] == [code_dir.name]


@pytest.mark.parametrize(
    ("do", "cls", "problem", "fix"),
    [
        ("input error", InputError, "[h] stage replay: The prompts are wrong.", "Mend them."),
        ("defect", StageError, "[h] stage replay: Stage replay failed with ZeroDivisionError: oops.", "Log: "),
        ("forget", StageError, "without a complete", ""),
        (
            "need a package",
            HostError,
            "[h] stage replay: the host has the wrong packages: No module named 'no_such_package' (Py",
            "na",
        ),
    ],
)
def test_each_failure_is_a_sentence_of_the_right_class(
    bench: Bench, do: str, cls: type[EvalError], problem: str, fix: str
) -> None:
    with pytest.raises(cls) as caught:
        bench.run(do)
    assert type(caught.value) is cls
    assert problem in caught.value.problem
    assert fix in caught.value.fix
    assert bench.run_dirs() == []


def test_a_killed_stage_is_told_with_its_peak_memory(bench: Bench) -> None:
    with pytest.raises(StageKilled, match="killed by signal 9, probably out of memory; peak memory was") as caught:
        bench.run("kill", megabytes=150)
    peak_mib = int(caught.value.problem.rpartition("peak memory was ")[2].partition(" MiB")[0])
    assert 150 < peak_mib < 300


def test_an_interpreter_that_is_not_there_is_a_host_error_at_once(bench: Bench) -> None:
    bench.run("work")
    bench.python = "/none/python"
    started = time.monotonic()
    with pytest.raises(HostError, match=r"\[h\] stage replay: could not start /none/python: .*No such file"):
        bench.run("work", number=1)
    assert time.monotonic() - started < 5
    assert bench.run_dirs() == []


@pytest.mark.parametrize("kill", [os.kill, os.killpg])
def test_a_supervisor_killed_takes_its_stage_with_it(bench: Bench, living: Living, kill: Callable[[int, int], None]) -> None:
    behind = bench.behind("hang")
    supervisor = bench.supervisor()
    wait_for(lambda: bench.events)
    kill(supervisor, signal.SIGKILL)
    error = behind.wait().error
    assert living(bench.directory) == []
    assert type(error) is HostError
    assert "[h] stage replay: its supervisor is gone without a word" in error.problem
    assert "confirmed" not in error.problem
    assert bench.run_dirs() == []


def test_a_deadline_ends_the_stage_and_its_children(bench: Bench, living: Living) -> None:
    with pytest.raises(DeadlineExceeded, match=r"\[h\] stage replay ran past its deadline of 1 s and was ended\.\n"):
        bench.run("hang", deadline_s=1)
    assert living(bench.directory) == []
    assert bench.run_dirs() == []


def test_ending_everything_ends_the_stage_and_its_children(bench: Bench, living: Living) -> None:
    behind = bench.behind("hang")
    wait_for(lambda: len(living(bench.directory)) >= 3)
    end_everything()
    error = behind.wait().error
    assert living(bench.directory) == []
    assert type(error) is Cancelled
    assert error.problem == "[h] stage replay was ended on request."
    assert "was ended on request" in bench.log_path.read_text(), "the stage's last words"
    with pytest.raises(Cancelled, match="was not started"):
        bench.run("work")


def test_a_listener_that_fails_ends_the_stage(bench: Bench, living: Living) -> None:
    def fail(_event: Event) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        bench.runner().run(bench.request("hang"), log_path=bench.log_path, deadline_s=30, on_event=fail)
    assert living(bench.directory) == []


def test_a_log_that_cannot_be_written_ends_the_stage(bench: Bench, living: Living) -> None:
    bench.log_path.mkdir(parents=True)
    with pytest.raises(EvalError, match="A directory where a file was expected"):
        bench.run("hang")
    assert living(bench.directory) == []


def test_a_link_cut_for_a_while_loses_nothing(bench: Bench) -> None:
    until = bench.directory / "go on"
    behind = bench.behind("count", count=200, pause_s=0.01, until=str(until))
    supervisor = bench.supervisor()
    wait_for(lambda: len(bench.numbers) > 5)
    bench.shell.cut(3)
    heard = len(bench.numbers)
    assert heard < 150
    wait_for(lambda: len(bench.numbers) == 200)
    assert bench.supervisor() == supervisor
    until.touch()
    assert behind.wait().answer is not None
    assert bench.shell.failures >= 3
    assert bench.numbers == list(range(200))
    assert [e["event"] for e in bench.events if e["event"] != "counted"] == ["milestone", "progress", "finished"]


def test_a_link_cut_for_good_is_a_host_error_within_the_grace(bench: Bench, living: Living) -> None:
    behind = bench.behind("hang", runner=bench.runner(lease_s=2, grace_s=0.8))
    wait_for(lambda: len(living(bench.directory)) >= 3)
    bench.shell.cut()
    cut = time.monotonic()
    error = behind.wait().error
    assert time.monotonic() - cut < 2
    assert type(error) is HostError
    assert "could not be reached for 0.8 s: [h] the link is down." in error.problem
    assert "it ends by itself within 2 s" in error.problem
    assert living(bench.directory) != []
    wait_for(lambda: living(bench.directory) == [], seconds=10)
    (run_dir,) = bench.run_dirs()
    assert json.loads((run_dir / "exit.json").read_text())["reason"] == "lease"


def test_a_request_to_end_is_answered_while_the_link_is_down(bench: Bench, living: Living) -> None:
    behind = bench.behind("hang", runner=bench.runner(lease_s=1, grace_s=0.8))
    wait_for(lambda: len(living(bench.directory)) >= 3)
    bench.shell.cut()
    end_everything()
    error = behind.wait().error
    assert type(error) is Cancelled
    assert error.problem.startswith("[h] stage replay was ended on request. It could not be confirmed that it is gone")


def test_a_stage_whose_lease_lapsed_during_a_cut_is_told_so(bench: Bench) -> None:
    behind = bench.behind("hang", runner=bench.runner(lease_s=0.6, grace_s=20))
    wait_for(lambda: bench.events)
    bench.shell.cut(1.5)
    error = behind.wait().error
    assert type(error) is HostError
    assert error.problem == "[h] stage replay was ended by its host, which had not heard of us for 0.6 s."


def test_a_listener_slower_than_the_lease_does_not_end_the_stage(bench: Bench) -> None:
    def dawdle(event: Event) -> None:
        bench.hear(event)
        time.sleep(1.6 if event["event"] == "milestone" else 0)

    until = bench.directory / "never"
    runner = bench.runner(lease_s=1)
    threading.Timer(1.5, until.touch).start()
    request = bench.request("count", count=1, until=str(until))
    runner.run(request, log_path=bench.log_path, deadline_s=30, on_event=dawdle)
    assert bench.events[-1]["event"] == "finished"


def test_a_lost_answer_to_the_start_does_not_start_it_twice(bench: Bench) -> None:
    bench.shell.lose_answer("supervise")
    bench.run("count", count=5)
    assert bench.shell.failures == 1
    assert sum("exec env" in script and "supervise" in script for script in bench.shell.scripts) == 2
    assert bench.numbers == list(range(5))
    assert [e["event"] for e in bench.events].count("milestone") == 1


def test_a_host_that_is_down_from_the_outset_is_told_at_once(bench: Bench) -> None:
    bench.shell.cut()
    started = time.monotonic()
    with pytest.raises(HostError, match="the link is down"):
        bench.run("work")
    assert time.monotonic() - started < 2


def test_a_slow_link_only_takes_longer(bench: Bench) -> None:
    bench.shell.delay_s = 0.05
    bench.run("count", count=50)
    assert bench.numbers == list(range(50))


def test_a_stage_ends_when_its_relay_is_killed(bench: Bench, living: Living) -> None:
    code = (
        "import sys; from pathlib import Path, PurePosixPath; from tests.local_shell import LocalShell\n"
        "from tests.test_remote_runner import Bench\n"
        "bench = Bench(Path(sys.argv[1]), sys.argv[2])\n"
        "bench.hear = lambda event: print(event, flush=True)\n"
        "bench.run('hang', runner=bench.runner(lease_s=1.2))\n"
    )
    relay = subprocess.Popen([sys.executable, "-c", code, str(bench.directory), bench.python], stdout=subprocess.PIPE, cwd=ROOT)
    assert relay.stdout is not None
    assert b"about to hang" in relay.stdout.readline()
    time.sleep(1.5)
    assert len(living(bench.directory)) >= 3, "the lease is renewed as long as the relay lives"
    os.kill(relay.pid, signal.SIGKILL)
    relay.communicate()
    wait_for(lambda: living(bench.directory) == [], seconds=10)


@pytest.mark.parametrize(("slots", "apart"), [(1, True), (2, False)])
def test_slots_are_respected(bench: Bench, slots: int, apart: bool) -> None:
    spans: list[tuple[float, float]] = []
    runner = bench.runner(slots=slots)

    def one(number: int) -> StageRun:
        times: list[float] = []
        request = bench.request("count", count=2, pause_s=0.3, number=number)
        ended = runner.run(request, log_path=bench.log_path, deadline_s=60, on_event=lambda _e: times.append(time.monotonic()))
        spans.append((times[0], times[-1]))
        return ended

    for behind in [Behind(lambda number=n: one(number)) for n in range(2)]:  # type: ignore[misc]
        assert behind.wait().answer is not None
    spans.sort()
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans)) is apart


def test_whoever_waits_for_a_slot_hears_of_the_end(bench: Bench) -> None:
    """Even while the one before does not give its slot back."""
    runner = bench.runner(slots=1)
    busy, done = threading.Event(), threading.Event()

    def hold(_event: Event) -> None:
        busy.set()
        done.wait(timeout=20)

    request = bench.request("hang")
    first = Behind(lambda: runner.run(request, log_path=bench.log_path, deadline_s=60, on_event=hold))
    assert busy.wait(timeout=20)
    second = bench.behind("work", runner=runner)
    end_everything()
    asked = time.monotonic()
    error = second.wait().error
    assert time.monotonic() - asked < 10
    done.set()
    assert type(error) is Cancelled
    assert "was not started" in error.problem
    assert type(first.wait().error) is Cancelled


def test_five_megabytes_of_log_arrive_whole(bench: Bench) -> None:
    bench.run("shout")
    assert bench.log_path.read_text().count("x" * 5_000_000) == 1


def test_a_flood_of_events_arrives_in_order_and_once(bench: Bench) -> None:
    bench.run("count", count=10_000)
    assert bench.numbers == list(range(10_000))


def test_rubbish_between_answers_is_skipped(bench: Bench) -> None:
    bench.run("answer rubbish")
    assert [event["event"] for event in bench.events] == ["milestone", "progress", "finished"]


def test_directories_of_dead_runs_are_removed_at_the_next_start(bench: Bench) -> None:
    runs = bench.work_dir / "runs"
    day = 24 * 3600
    for name, age_s, ours in (("dead", day + 60, True), ("young", day - 60, True), ("of another maker", day + 60, False)):
        (runs / name).mkdir(parents=True)
        (runs / name / ("supervise.json" if ours else "request.json")).touch()
        os.utime(runs / name, (time.time() - age_s,) * 2)
    bench.run("work")
    assert sorted(path.name for path in runs.iterdir()) == ["of another maker", "young"]


def test_a_full_disk_on_the_host_is_told_as_such(bench: Bench) -> None:
    class Full(LocalShell):
        def write_small(self, path: PurePosixPath, content: bytes) -> None:
            if path.name == "request.json":
                raise StorageError("No room.", "Free some.")
            super().write_small(path, content)

    bench.shell = Full()
    with pytest.raises(StorageError, match="No room"):
        bench.run("work")
    assert bench.run_dirs() == []


SHIPPED_COMPARE = """
import sys
def run(context):
    context.milestone(sys.modules[__name__].__file__)
    context.milestone(sys.executable)
    with context.writing() as writer:
        (writer.path / "out.txt").write_text("x")
"""


@pytest.mark.parametrize("name", ["work", 'a host\'s "work" dir: $HOME, ünïcödé'])
def test_the_shipped_code_runs_in_any_work_dir_with_a_python_below_the_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A colon ends an entry of PYTHONPATH: then what is installed there would run instead of what was shipped."""
    (tmp_path / "home of me" / "bin").mkdir(parents=True)
    python = tmp_path / "home of me" / "bin" / "python 3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home of me"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(pack_code().content)) as packed, zipfile.ZipFile(buffer, "w") as changed:
        for entry in packed.infolist():
            content = packed.read(entry)
            changed.writestr(entry, SHIPPED_COMPARE if entry.filename.endswith("stages/compare.py") else content)
    work_dir, heard = tmp_path / name, list[Event]()
    runner = RemoteRunner(
        LocalShell(),
        work_dir=PurePosixPath(work_dir),
        python="~/bin/python 3",
        code=CodeArchive(content=buffer.getvalue()),
        threads=1,
        slots=1,
        poll_s=0.05,
    )
    request = Request(stage="compare", key="compare-x", work_dir=work_dir, inputs={}, parameters={}, local={})
    runner.run(request, log_path=tmp_path / "log", deadline_s=60, on_event=heard.append)
    said = [event["message"] for event in heard if event["event"] == "milestone"]
    assert Path(said[0]).is_relative_to(work_dir / "code"), "not what is installed here"
    assert runner_left(work_dir) == []


def runner_left(work_dir: Path) -> list[Path]:
    return list((work_dir / "runs").glob("*"))
