"""Many labs on one machine: each has a number, which is in all its names and addresses, and a file that says whose it is.

A file below /run, as the kernel's own network namespaces: a reboot takes both. Its lock, not its existence, tells whether the
owner lives, so that nothing is swept that somebody uses, and everything that a killed owner left is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import time
from pathlib import Path
from typing import IO, Any

from namespaces import remove_all

RUN = Path("/run/dflash-lab")
PATIENCE_S = 2.0
MARK = "made-by-lab.py"
SLOTS = 31
"""Numbers 0..30: each has eight /24 of 10.99.0.0/16."""


def prefix(slot: int) -> str:
    """What the names of a lab's namespaces and cables begin with; an interface's name has at most 15 characters."""
    return f"dflab{slot}-"


class Instance:
    """A number that is ours until `release`; nobody else's lab has it meanwhile."""

    def __init__(self, slot: int, file: IO[str]) -> None:
        self.slot = slot
        self._file = file

    @property
    def state(self) -> Path | None:
        """The directory of the lab that has this number, None where none has."""
        noted = self._read()
        return Path(noted["state"]) if noted else None

    @property
    def kept(self) -> bool:
        """The lab shall outlive the process that made it."""
        return bool(self._read().get("kept"))

    def note(self, state: Path, *, kept: bool) -> None:
        """Say, before anything is made, where this lab is; `kept`: only `lab.py down` ends it."""
        self._write(json.dumps({"state": str(state), "kept": kept}))

    def clear(self) -> None:
        """End every process of the lab with this number and remove its network and its directory."""
        remove_all(prefix(self.slot))
        state = self.state
        if state is not None and (state / MARK).exists():
            shutil.rmtree(state)
        self._write("")

    def release(self) -> None:
        """Let go of the number."""
        self._file.close()

    def _read(self) -> dict[str, Any]:
        self._file.seek(0)
        return dict(json.loads(self._file.read() or "{}"))

    def _write(self, text: str) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(text)
        self._file.flush()


def sweep() -> None:
    """Remove what labs left whose owners are dead. Those that were to be kept stay, and so do those of the living."""
    for _state, slot in listed():
        instance = _hold(slot)
        if instance is not None:
            if instance.state is not None and not instance.kept:
                instance.clear()
            instance.release()


def free() -> Instance:
    """A number for a new lab. Raises RuntimeError where all are taken."""
    for slot in range(SLOTS):
        instance = _hold(slot)
        if instance is not None:
            if instance.state is None:
                return instance
            instance.release()
    raise RuntimeError(f"{SLOTS} labs are up on this machine; end one with `lab.py down --state DIR`")


def of(state: Path) -> Instance | None:
    """The lab in `state`, whose maker has ended; None where there is none. Raises RuntimeError where its maker still runs."""
    until = time.monotonic() + PATIENCE_S  # another lab's start looks at each file for a moment
    for slot in [slot for place, slot in listed() if place == state]:
        while (instance := _hold(slot)) is None:
            if time.monotonic() > until:
                raise RuntimeError(f"the lab in {state} belongs to a process that still runs")
            time.sleep(0.02)
        if instance.state == state:
            return instance
        instance.release()
    return None


def listed() -> list[tuple[Path, int]]:
    """(directory, number) of every lab, whoever holds it."""
    found = []
    for slot in range(SLOTS):
        with contextlib.suppress(OSError, ValueError):
            found.append((Path(json.loads(_file(slot).read_text())["state"]), slot))
    return found


def _hold(slot: int) -> Instance | None:
    RUN.mkdir(exist_ok=True)
    file = _file(slot).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return Instance(slot, file)


def _file(slot: int) -> Path:
    return RUN / str(slot)
