"""Process groups and processes as /proc shows them: who is in one, is this still the same one, end it all. Linux only.

A process number alone names nothing: numbers are used again. A number with its start time and the boot it belongs to does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TERM_GRACE_S = 6.0
KILL_GRACE_S = 10.0
POLL_S = 0.05
_GONE = ("Z", "X")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """One process that led a group, told from any later one with its number."""

    pid: int
    """Process number; also the number of its group and session."""

    start_ticks: int
    """When it started, in clock ticks since boot (field 22 of /proc/PID/stat)."""

    boot_id: str
    """Which boot of which machine that was."""

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """The caller's own. Raises OSError where there is no /proc."""
        stat = _stat_fields(os.getpid())
        if stat is None:
            raise OSError("there is no /proc")
        return cls(pid=os.getpid(), start_ticks=int(stat[19]), boot_id=_boot_id())

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProcessIdentity:
        """What `to_json` gave. Raises KeyError, TypeError, ValueError."""
        return cls(pid=int(data["pid"]), start_ticks=int(data["start_ticks"]), boot_id=str(data["boot_id"]))

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    def alive(self) -> bool:
        """True while this very process runs; a zombie does not run."""
        stat = _stat_fields(self.pid)
        return stat is not None and self._is_ours(stat) and stat[0] not in _GONE

    def number_is_ours(self) -> bool:
        """False once the number may belong to somebody else: then its group must not be signalled."""
        stat = _stat_fields(self.pid)
        return _boot_id() == self.boot_id if stat is None else self._is_ours(stat)

    def _is_ours(self, stat: list[str]) -> bool:
        return int(stat[19]) == self.start_ticks and _boot_id() == self.boot_id


def members(pgid: int) -> list[int]:
    """Numbers of the group's processes that still run (zombies that wait to be reaped do not)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        stat = _stat_fields(int(entry.name))
        if stat is not None and int(stat[2]) == pgid and stat[0] not in _GONE:
            found.append(int(entry.name))
    return found


def end_group(
    pgid: int, *, spare: int | None = None, term_grace_s: float = TERM_GRACE_S, kill_grace_s: float = KILL_GRACE_S
) -> list[int]:
    """SIGTERM, then SIGKILL, to a whole group but for the process `spare`; returns those that run all the same, normally none."""
    left: list[int] = []
    for number, grace_s in ((signal.SIGTERM, term_grace_s), (signal.SIGKILL, kill_grace_s)):
        until = time.monotonic() + grace_s
        _signal(pgid, number, spare)
        while left := [pid for pid in members(pgid) if pid != spare]:
            if time.monotonic() >= until:
                break
            time.sleep(POLL_S)
            if number == signal.SIGKILL:
                _signal(pgid, number, spare)
        if not left:
            break
    return left


def _signal(pgid: int, number: signal.Signals, spare: int | None) -> None:
    if spare is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pgid, number)
        return
    for pid in members(pgid):
        if pid != spare:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third on (state, parent, group, session, ...); None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split() or None
    except OSError:
        return None


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
