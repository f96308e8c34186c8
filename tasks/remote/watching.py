"""Watching where training saves: every complete checkpoint once, in the order of training, whatever restarts in between.

The training host is only read. What was done with a checkpoint stands in a book on the relay, written after each one, so
a watcher that is ended in the middle does that checkpoint again and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_model.errors import CheckpointError, StorageError
from dflash_model.storage import read_json, write_json
from tasks.remote.drafters import DIRECTORY_FILES, SETTLE_S, RemoteDrafter, discover
from tasks.remote.host import FileFacts, Host, literal_pattern
from tasks.remote.run_directories import checkpoints_in

log = logging.getLogger(__name__)

BOOK_VERSION = 1
EVALUATED, REFUSED = "evaluated", "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """A complete checkpoint that the book does not know."""

    drafter: RemoteDrafter
    """What and where it is."""

    mark: str
    """Paths, sizes and times of its files: how it is known again without being read."""

    mtime_ns: int
    """When it was saved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What was done with a checkpoint."""

    mark: str
    """As in Sighting."""

    digest: str
    """Its content."""

    name: str
    """How tables call it."""

    step: int | None
    """Training step, where the file tells."""

    outcome: str
    """EVALUATED or REFUSED."""

    detail: str
    """The run's id, or why it was refused."""


class WatchBook:
    """The entries of one watch, in a file that is always whole."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises StorageError for a file of another kind or version."""
        self._path = path
        data: dict[str, Any] = read_json(path) if path.is_file() else {"book_version": BOOK_VERSION, "entries": []}
        if not isinstance(data, dict) or data.get("book_version") != BOOK_VERSION:
            raise StorageError(f"{path} is no watch book of version {BOOK_VERSION}.", "Delete it; everything is looked at again.")
        self.entries = [Entry(**entry) for entry in data["entries"]]

    @property
    def marks(self) -> set[str]:
        """Of all entries."""
        return {entry.mark for entry in self.entries}

    def knows(self, drafter: RemoteDrafter) -> bool:
        """Whether the same content was done before, under whatever name."""
        return any(entry.digest == drafter.digest for entry in self.entries)

    def note(self, sighting: Sighting, *, outcome: str, detail: str) -> None:
        """Add an entry and write the book."""
        found = sighting.drafter
        entry = Entry(mark=sighting.mark, digest=found.digest, name=found.name, step=found.step, outcome=outcome, detail=detail)
        self.entries.append(entry)
        write_json(self._path, {"book_version": BOOK_VERSION, "entries": [asdict(entry) for entry in self.entries]})


def new_checkpoints(host: Host, pattern: str, *, known: Container[str], settle_s: float = SETTLE_S) -> list[Sighting]:
    """Complete drafters that match `pattern` on `host` and whose mark is not `known`: by training step, then by time.

    What is not complete is passed over; it is looked at again the next time. None of it is read twice once it is known.
    """
    found = []
    for match in host.glob(pattern):
        for facts in checkpoints_in(host, match):
            mark = _mark(host, facts)
            if mark in known:
                continue
            try:
                drafter = discover(host, literal_pattern(facts.path), settle_s=settle_s)
            except CheckpointError as exc:
                log.info("[%s] passed over %s: %s", host.name, facts.path, exc.problem)
                continue
            found.append(Sighting(drafter=drafter, mark=mark, mtime_ns=facts.mtime_ns))
    return sorted(found, key=lambda one: (one.drafter.step is None, one.drafter.step or 0, one.mtime_ns, one.drafter.path))


def _mark(host: Host, facts: FileFacts) -> str:
    files = [facts]
    if facts.is_dir:
        inside = (host.glob(f"{literal_pattern(facts.path)}/{pattern}") for pattern in DIRECTORY_FILES)
        files = sorted((one for each in inside for one in each if not one.is_dir), key=lambda one: one.path)
    return " ".join([str(facts.path), *(f"{one.path.name}:{one.size_bytes}:{one.mtime_ns}" for one in files)])
