"""The guardian of one stage program on a host whose link may be cut. It detaches, so that the link's end does not end it.

    python -m dflash_model.stages.supervise RUN_DIR         start; prints who it is once it has detached. Twice is once.
    python -m dflash_model.stages.supervise RUN_DIR --end   end it and its whole group, wait until they are gone, say who stays

RUN_DIR holds, written by the runner: request.json · supervise.json {python, lease_s, deadline_s}
    lease          renewed (its content or time changes) as long as a runner lives; else the group ends after lease_s
    cancel         when it appears, the group ends
and by the supervisor: pid · answers.jsonl (the stage's descriptor 1) · log (its descriptor 2)
    exit.json      comes last, when all but the supervisor are gone: see `Ending`
The stage is in the supervisor's group and holds a pipe from it: if the supervisor dies, the stage ends itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dflash_model.errors import EvalError, InputError
from dflash_model.stages.process_groups import KILL_GRACE_S, TERM_GRACE_S, ProcessIdentity, end_group
from dflash_model.storage import read_json, write_file, write_json

TICK_S = 0.1
REACTION_S = 2.0
STALE_AFTER_S = 24 * 3600.0

BY_ITSELF, BY_LEASE, BY_DEADLINE, BY_CANCEL, BY_SIGNAL, NOT_STARTED = "itself", "lease", "deadline", "cancel", "signal", "start"
"""Why a run ended: see `Ending.reason`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Orders:
    """supervise.json, and the stage's name out of request.json."""

    python: str
    """Interpreter of the stage program."""

    stage: str
    """Name in the registry."""

    lease_s: float
    """Longest time without a sign of life from a runner."""

    deadline_s: float
    """Longest time of the stage."""

    @classmethod
    def read(cls, run_dir: Path) -> Orders:
        """Raises EvalError."""
        data, request = read_json(run_dir / "supervise.json"), read_json(run_dir / "request.json")
        try:
            return cls(
                python=os.path.expanduser(str(data["python"])),  # noqa: PTH111 - ~ means the user's home on this host
                stage=str(request["stage"]),
                lease_s=float(data["lease_s"]),
                deadline_s=float(data["deadline_s"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise InputError(f"The orders in {run_dir} are not complete: {exc!r}.", "Write them as supervise.py says.") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """exit.json: how a run ended."""

    exit_code: int | None
    """Of the stage: its status, or -N for signal N. None where it was not started or does not end."""

    peak_rss_bytes: int | None
    """Largest resident set of the stage."""

    seconds: float
    """Wall time of the stage."""

    reason: str
    """itself · lease · deadline · cancel · signal (SIGTERM to the supervisor) · start (it could not be started)."""

    detail: str
    """What the system said where it could not be started."""

    left: tuple[int, ...]
    """Processes that run all the same, even after signal 9; normally none."""


class _Supervisor:
    """Runs in the detached process, which leads the group."""

    def __init__(self, run_dir: Path, orders: Orders) -> None:
        self._run_dir, self._orders = run_dir, orders
        self._started = self._renewed = time.monotonic()
        self._lease = self._read_lease()
        self._asked = False
        signal.signal(signal.SIGTERM, self._on_term)

    def run(self) -> None:
        """Start the stage, guard it to its end, leave exit.json."""
        reason = self._why_end()
        if reason is not None:
            self._leave(reason)
            return
        try:
            child = self._start()
        except OSError as exc:
            self._leave(NOT_STARTED, detail=exc.strerror or str(exc))
            return
        remove_stale_runs(self._run_dir.parent)
        reason = self._guard(child)
        left = tuple(end_group(os.getpgrp(), spare=os.getpid()))
        if child.pid in left:
            self._leave(reason, left=left)
            return
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        self._leave(reason, exit_code=child.returncode, peak_rss_bytes=usage.ru_maxrss * 1024, left=left)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [self._orders.python, "-m", "dflash_model.stages", self._orders.stage]
        with (self._run_dir / "answers.jsonl").open("ab") as answers, (self._run_dir / "log").open("ab") as log_file:
            return subprocess.Popen(
                [*command, str(self._run_dir / "request.json"), "--parent-pipe"],
                cwd=self._run_dir,
                stdin=subprocess.PIPE,
                stdout=answers,
                stderr=log_file,
            )

    def _guard(self, child: subprocess.Popen[bytes]) -> str:
        """Wait until the stage has ended, unreaped as yet, or must end; why."""
        while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            reason = self._why_end()
            if reason is not None:
                return reason
            time.sleep(TICK_S)
        return BY_ITSELF

    def _why_end(self) -> str | None:
        if self._asked:
            return BY_SIGNAL
        if (self._run_dir / "cancel").exists() or not self._run_dir.is_dir():
            return BY_CANCEL
        now, lease = time.monotonic(), self._read_lease()
        if lease != self._lease:
            self._lease, self._renewed = lease, now
        if now - self._renewed > self._orders.lease_s:
            return BY_LEASE
        return BY_DEADLINE if now - self._started > self._orders.deadline_s else None

    def _read_lease(self) -> tuple[bytes, int] | None:
        """What changes when the lease is renewed. The time counts too: on a full disk nothing else can change."""
        path = self._run_dir / "lease"
        try:
            return path.read_bytes(), path.stat().st_mtime_ns
        except OSError:
            return None

    def _leave(self, reason: str, **facts: Any) -> None:
        defaults: dict[str, Any] = {"exit_code": None, "peak_rss_bytes": None, "detail": "", "left": ()}
        ending = Ending(seconds=round(time.monotonic() - self._started, 3), reason=reason, **(defaults | facts))
        if self._run_dir.is_dir():
            write_json(self._run_dir / "exit.json", asdict(ending))

    def _on_term(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked = True


def read_identity(run_dir: Path) -> ProcessIdentity | None:
    """Who supervises, or did; None where nobody ever started, or the file is damaged."""
    try:
        return ProcessIdentity.from_json(read_json(run_dir / "pid"))
    except (EvalError, KeyError, TypeError, ValueError):
        return None


def remove_stale_runs(runs_dir: Path) -> None:
    """Remove run directories in which nothing has moved for a day and nobody supervises. Those of other makers stay."""
    for orders in runs_dir.glob("*/supervise.json"):
        run_dir = orders.parent
        with contextlib.suppress(OSError):
            supervisor = read_identity(run_dir)
            old = time.time() - run_dir.stat().st_mtime > STALE_AFTER_S
            if old and (supervisor is None or not supervisor.alive()):
                shutil.rmtree(run_dir, ignore_errors=True)


def end_run(run_dir: Path) -> list[int]:
    """End a run's whole group and wait until it is gone; returns the processes that run all the same.

    A supervisor that does not do it in time is ended too; one that was about to start finds `cancel` and starts nothing.
    """
    with contextlib.suppress(OSError):
        (run_dir / "cancel").touch()
    supervisor = read_identity(run_dir)
    if supervisor is None:
        return []
    until = time.monotonic() + TERM_GRACE_S + KILL_GRACE_S + REACTION_S
    while supervisor.alive() and time.monotonic() < until:
        time.sleep(TICK_S)
    if not supervisor.number_is_ours():
        return []
    return end_group(supervisor.pid, term_grace_s=TERM_GRACE_S, kill_grace_s=KILL_GRACE_S)


def _launch(run_dir: Path) -> int:
    """Fork the supervisor, wait until it has put its name down, print that name."""
    orders = Orders.read(run_dir)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        return _detached(run_dir, orders, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as until_closed:
        until_closed.read()
    supervisor = read_identity(run_dir)
    if supervisor is None:
        print(f"no supervisor has started; see {run_dir / 'log'}", file=sys.stderr)
        return 1
    print(json.dumps(supervisor.to_json()))
    return 0


def _detached(run_dir: Path, orders: Orders, ready: int) -> int:
    os.setsid()
    _redirect(run_dir / "log")
    supervisor = _Supervisor(run_dir, orders)
    if _claim(run_dir):
        os.close(ready)
        supervisor.run()
    return 0


def _redirect(log_path: Path) -> None:
    """Let go of the link's descriptors: whoever holds one open keeps the link's channel open."""
    null = os.open(os.devnull, os.O_RDWR)
    log_file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (null, 1), (log_file, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log_file)


def _claim(run_dir: Path) -> bool:
    """Put this process's name down, whole; False where another one has."""
    mine = run_dir / f"pid.{os.getpid()}"
    write_file(mine, json.dumps(ProcessIdentity.of_this_process().to_json()).encode())
    try:
        os.link(mine, run_dir / "pid")
    except FileExistsError:
        return False
    finally:
        mine.unlink()
    return True


def main(argv: list[str] | None = None) -> int:
    """Start or end one supervised run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_model.stages.supervise", description="Guard one stage program.")
    parser.add_argument("run_dir", type=Path, help="holds request.json and supervise.json")
    parser.add_argument("--end", action="store_true", help="end the run instead; prints the processes that stay")
    options = parser.parse_args(argv)
    run_dir = options.run_dir.absolute()
    if options.end:
        print(json.dumps({"left": end_run(run_dir)}))
        return 0
    try:
        return _launch(run_dir)
    except EvalError as exc:
        print(exc, file=sys.stderr)
        return exc.exit_code


if __name__ == "__main__":
    sys.exit(main())
