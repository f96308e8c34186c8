"""Child process groups: start in a group of their own, stream, stop at a deadline or on request, confirm gone.

Signal 9 to this process cannot be caught; the child's standard input is a pipe from us for that case (see the stage
protocol): it closes with us, and the child ends its own group.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from dflash_model.errors import HostError
from dflash_model.stages.process_groups import KILL_GRACE_S, end_group
from tasks.remote import failures
from tasks.remote.answers import AnswerLines
from tasks.remote.host import OnEvent

POLL_S = 0.2

_ending = threading.Event()


def end_everything() -> None:
    """Ask every running child to end; those who wait for one raise Cancelled once its group is gone."""
    _ending.set()


def ending() -> bool:
    """True once `end_everything` was called."""
    return _ending.is_set()


def allow_children() -> None:
    """Undo `end_everything` (a second run in the same process)."""
    _ending.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a child ended."""

    exit_code: int
    """Exit status, or -N for signal N."""

    seconds: float
    """Wall time."""

    peak_rss_bytes: int
    """Largest resident set of the child."""


def run_child(
    command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path, deadline_s: float, on_event: OnEvent, what: str
) -> Ended:
    """Run `command` in a new session, parse its JSON lines, append its stderr to `log_path`.

    Raises DeadlineExceeded or Cancelled after its whole group is gone, HostError where it cannot be started.
    """
    if ending():
        raise failures.not_started(what)
    started = time.monotonic()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log_file:
        try:
            child = subprocess.Popen(
                command,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                start_new_session=True,
            )
        except OSError as exc:
            raise failures.cannot_start(what, command[0], str(exc.strerror)) from exc
    seen = _Peak(child.pid)
    with ExitStack() as afterwards:  # last named is first done, whatever is raised
        afterwards.callback(_close_pipes, child)
        afterwards.callback(_reap, child)
        afterwards.callback(_require_gone, child.pid)
        _stream(child, deadline_s=deadline_s, on_event=on_event, what=what, seen=seen)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    peak = seen.best(usage.ru_maxrss * 1024)
    return Ended(exit_code=child.returncode, seconds=time.monotonic() - started, peak_rss_bytes=peak)


class _Peak:
    """A child's largest resident set. The kernel's own figure starts at ours, since the child is forked from us; below that
    only looking while it runs tells."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._floor_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._looked_bytes = 0

    def look(self) -> None:
        """Note the child's high-water mark as it is now."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in self._status.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    self._looked_bytes = max(self._looked_bytes, int(line.split()[1]) * 1024)

    def best(self, accounted_bytes: int) -> int:
        """The kernel's figure where it is the child's own, else the largest one seen."""
        return accounted_bytes if accounted_bytes > self._floor_bytes else self._looked_bytes


def _stream(child: subprocess.Popen[bytes], *, deadline_s: float, on_event: OnEvent, what: str, seen: _Peak) -> None:
    """Hand JSON lines on until the child has ended; a closed answer descriptor alone does not lift the deadline."""
    deadline = time.monotonic() + deadline_s
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        lines, open_end = AnswerLines(), True
        while True:
            if ending():
                raise failures.ended_on_request(what)
            if time.monotonic() > deadline:
                raise failures.past_deadline(what, deadline_s)
            seen.look()
            if not open_end or not selector.select(POLL_S):
                if child_has_exited(child.pid):
                    return
                time.sleep(0 if open_end else POLL_S)
                continue
            block = os.read(child.stdout.fileno(), 1 << 16)
            open_end = bool(block)
            for event in lines.feed(block):
                on_event(event)


def child_has_exited(pid: int) -> bool:
    """True once the child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _require_gone(pgid: int) -> None:
    """End a whole group. Returns when it is gone but for an unreaped leader. Raises HostError if it stays."""
    if end_group(pgid):
        raise HostError(
            f"Process group {pgid} does not end, {failures.STUCK}.", "Look for a process in uninterruptible sleep (state D)."
        )


def _reap(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ChildProcessError, subprocess.TimeoutExpired):
        child.wait(timeout=KILL_GRACE_S)


def _close_pipes(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
