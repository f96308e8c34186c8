"""How far the transfers of this relay got, so that the next run goes on where a killed one stopped.

One small JSON file a transfer below the relay's home, replaced whole. It names stretches of the parts on the other host by
their sha256: whoever goes on has that host hash them before it believes that they are there. A lock beside it keeps two runs
of one relay from filling the same parts.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash_model.errors import EvalError, from_os_error
from dflash_model.storage import read_json, write_json
from tasks.remote.patience import pause

log = logging.getLogger(__name__)

FORMAT = 1
MARK_BYTES = 16 << 20
"""How far apart marks are at least."""

KEPT_MARKS = 16
"""More than can be under way to a host's disk."""

LOOK_AGAIN_S = 0.5
OLD_S = 14 * 24 * 3600.0


@dataclass(slots=True)
class Span:
    """A stretch of one part that one run has filled."""

    begin: int
    """Offset in the whole file."""

    end: int
    """Likewise, behind its last byte."""

    sha256: str
    """Of those bytes."""

    reads: list[tuple[str, int, int, str]] = field(default_factory=list)
    """(file, offset, size, sha256) of what was read for them, where the checkpoint has no checksums of its own."""


@dataclass(slots=True)
class PartNotes:
    """What is known of one part."""

    begin: int
    """Where the part belongs in the whole file."""

    end: int
    """Where the next one begins."""

    spans: list[Span] = field(default_factory=list)
    """Filled by earlier runs, one behind the other from `begin`."""

    marks: list[Span] = field(default_factory=list)
    """Of the run that filled it last: from where that began to ever later ends."""


class Journal:
    """The notes of one transfer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.parts: list[PartNotes] = []

    def resume(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Take up the notes of an earlier run where they speak of the same (begin, end) parts; else begin anew."""
        found: list[PartNotes] = []
        if self._path.exists():
            with contextlib.suppress(EvalError, KeyError, TypeError):
                data = read_json(self._path)
                found = [_part(one) for one in data["parts"]] if data["format_version"] == FORMAT else []
        same = [(one.begin, one.end) for one in found] == list(ranges)
        self.parts = found if same else [PartNotes(begin=begin, end=end) for begin, end in ranges]

    def mark(self, number: int, span: Span) -> None:
        """Part `number` has been filled to `span.end`; `span` begins where this run began with it. Raises EvalError."""
        with self._lock:
            marks = self.parts[number].marks
            marks.append(span)
            del marks[:-KEPT_MARKS]
            self._write()

    def settle(self, number: int, spans: list[Span]) -> None:
        """Part `number` begins with these stretches, which its host was seen to hold. Raises EvalError."""
        with self._lock:
            self.parts[number].spans, self.parts[number].marks = spans, []
            self._write()

    def forget(self) -> None:
        """The transfer is over, or starts again from nothing."""
        self.parts = [PartNotes(begin=one.begin, end=one.end) for one in self.parts]
        self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        write_json(self._path, {"format_version": FORMAT, "parts": [asdict(part) for part in self.parts]})


def _part(data: dict[str, Any]) -> PartNotes:
    spans, marks = ([_span(one) for one in data[name]] for name in ("spans", "marks"))
    return PartNotes(begin=data["begin"], end=data["end"], spans=spans, marks=marks)


def _span(data: dict[str, Any]) -> Span:
    return Span(**data | {"reads": [(file, offset, size, digest) for file, offset, size, digest in data["reads"]]})


@contextmanager
def open_journal(directory: Path, name: str, *, check: Callable[[], None]) -> Iterator[Journal]:
    """The journal of transfer `name`, for this process and thread alone; waits for whoever has it. Raises EvalError.

    `check` may raise while it waits.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_old(directory)
        lock = (directory / f"{name}.lock").open("a")
    except OSError as exc:
        raise from_os_error(exc, f"opening the journal {name} in {directory}") from exc
    with lock:
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    log.info("another run moves %s; waiting for it", name)
                told = True
                pause(LOOK_AGAIN_S, check)
        yield Journal(directory / f"{name}.json")


def relay_id(directory: Path) -> str:
    """Eight letters that tell this relay's parts on other hosts from those of other relays; made once. Raises EvalError."""
    path = directory / "relay-id"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_hex(4))
        text = path.read_text(encoding="utf-8").strip()
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    # A run that was killed between the two steps has left an empty file; the name then is the same for all its runs, too.
    return text if text.isalnum() else "0"


def _remove_old(directory: Path) -> None:
    """Notes that nobody has touched for two weeks. Locks stay: removing one that is waited for would make it two."""
    for path in directory.glob("*.json"):
        if time.time() - path.stat().st_mtime > OLD_S:
            path.unlink(missing_ok=True)
