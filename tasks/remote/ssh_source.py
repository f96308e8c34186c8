"""Files on a host as ByteSources, over one SFTP session: each opened once, so a file that takes its name later is not read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from dflash_model.checkpoint.directory import check_plain_name
from dflash_model.checkpoint.source import ByteSource, check_range
from dflash_model.errors import CheckpointError, EvalError, SourceChanged
from tasks.remote.host import FileFacts
from tasks.remote.read_ahead import ReadAhead
from tasks.remote.sftp import Sftp
from tasks.remote.sftp_sessions import SftpSessions
from tasks.remote.ssh_facts import SshFacts
from tasks.remote.throttle import Throttle


@dataclass(frozen=True, slots=True)
class SourcePlace:
    """What the sources of one host need of it."""

    host: str
    """Its name."""

    sessions: SftpSessions
    """Where SFTP sessions come from."""

    looking: SshFacts
    """Facts about paths."""

    hashing: Callable[[PurePosixPath], str]
    """sha256 of a file, computed there."""

    throttle: Throttle
    """Is told of every byte read."""


class SshSource:
    """Random access to one file of a host, for one thread at a time; the files of one session share that thread."""

    def __init__(self, place: SourcePlace, facts: FileFacts, *, sftp: Sftp, handle: bytes, ahead: ReadAhead) -> None:
        self._place = place
        self._facts = facts
        self._sftp = sftp
        self._handle = handle
        self._ahead = ahead

    @property
    def name(self) -> str:
        """host:path."""
        return f"{self._place.host}:{self._facts.path}"

    @property
    def size_bytes(self) -> int:
        """Size when it was opened."""
        return self._facts.size_bytes

    @property
    def inode(self) -> int:
        """Inode when it was opened, 0 where the host does not tell."""
        return self._facts.inode

    @property
    def mtime_ns(self) -> int:
        """Modification time when it was opened; whole seconds where the host tells no more."""
        return self._facts.mtime_ns

    def expect(self, ranges: Sequence[tuple[ByteSource, int, int]]) -> None:
        """The reads that come next, of this file and others of the same session: asked for before they are wanted. Raises EvalError."""
        own = [(source._handle, offset, size) for source, offset, size in ranges if isinstance(source, SshSource)]
        self._ahead.expect(own, doing=f"reading {self._facts.path}")

    def read_at(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`. Raises CheckpointError where the file has fewer, HostError."""
        check_range(self, offset, size)
        found = self._ahead.take(self._handle, offset, size)
        if found is None:
            return self.read_many([(offset, size)])[0]
        answer = b"".join(found)
        self._place.throttle.moved(len(answer))
        self._require_whole(offset, size, len(answer))
        return answer

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """`read_at` of every (offset, size), all in flight together."""
        for offset, size in ranges:
            check_range(self, offset, size)
        self._ahead.forget()
        answers = self._sftp.read(self._handle, ranges, doing=f"reading {self._facts.path}")
        self._place.throttle.moved(sum(map(len, answers)))
        for (offset, size), answer in zip(ranges, answers, strict=True):
            self._require_whole(offset, size, len(answer))
        return answers

    def _require_whole(self, offset: int, size: int, came: int) -> None:
        if came != size:
            raise SourceChanged(
                f"[{self._place.host}] {self._facts.path} was cut short while it was read: nothing is left at byte {offset + came}.",
                "Wait until the training run has finished writing it, then run again.",
            )

    def sha256(self) -> str:
        """sha256 of the file under this name, computed on its host. Raises SourceChanged where it is not this file any more."""
        digest = self._place.hashing(self._facts.path)
        change = self.changed()
        if change is not None:
            raise SourceChanged(change, "Wait until the training run has finished writing it, then run again.")
        return digest

    def changed(self) -> str | None:
        """A sentence if the path now names another file, or this file was written to since it was opened; else None."""
        then, seen = self._facts, self._place.looking.see(self._facts.path)
        what = f"[{self._place.host}] {then.path}"
        if seen is None:
            return f"{what} was removed while it was read."
        now = seen.facts
        if now.inode != then.inode:
            return f"{what} was replaced by another file while it was read."
        if now.size_bytes != then.size_bytes:
            return f"{what} changed its size from {then.size_bytes} to {now.size_bytes} bytes while it was read."
        return f"{what} was written to while it was read." if now.mtime_ns != then.mtime_ns else None


class SshDirectory:
    """The files of one directory of a host, opened on demand over one session (a ByteDirectory)."""

    def __init__(self, place: SourcePlace, path: PurePosixPath, *, sftp: Sftp) -> None:
        self._place = place
        self._path = path
        self._sftp = sftp
        self._ahead = ReadAhead(sftp)
        self._open: dict[str, SshSource] = {}
        self._handles: list[bytes] = []

    @property
    def name(self) -> str:
        """host:path."""
        return f"{self._place.host}:{self._path}"

    def names(self) -> list[str]:
        """Sorted names of its files. Raises CheckpointError where the directory is missing."""
        seen = self._place.looking.see(self._path)
        if seen is None or not seen.facts.is_dir:
            raise CheckpointError(f"[{self._place.host}] there is no checkpoint directory at {self._path}.", "Check the path.")
        self._ahead.forget()
        entries = sorted(name for name, _ in self._sftp.listing(self._path))
        facts = self._place.looking.see_all([self._path / name for name in entries])
        return [name for name, found in zip(entries, facts, strict=True) if found is not None and found.is_regular]

    def open(self, name: str) -> SshSource:
        """The file `name`; asked twice, the same source. Raises CheckpointError where it is missing or no plain file."""
        if name not in self._open:
            self._open[name] = self.open_path(self._path / check_plain_name(name, self.name))
        return self._open[name]

    def open_path(self, path: PurePosixPath) -> SshSource:
        """The file at `path`, over this session."""
        seen = self._place.looking.see(path)
        host = self._place.host
        if seen is None:
            raise CheckpointError(
                f"[{host}] there is no checkpoint at {path}.", "Check the path, and whether the training run has written it yet."
            )
        if not seen.is_regular:  # looked at before it is opened: opening a named pipe would wait for a writer
            raise CheckpointError(f"[{host}] {path} is not a regular file.", "Give the path of a checkpoint file.")
        self._ahead.forget()
        handle = self._sftp.open(path)
        self._handles.append(handle)
        # Its size may have moved since: the one of the open file counts, and changed() sees the difference in time.
        size = self._sftp.fstat(handle, doing=f"looking at {path}").size_bytes
        return SshSource(self._place, replace(seen.facts, size_bytes=size), sftp=self._sftp, handle=handle, ahead=self._ahead)

    def close(self) -> None:
        """Close all handles, where the session still answers."""
        with contextlib.suppress(EvalError):
            if self._sftp.is_owed and self._sftp.is_open:
                self._ahead.forget()
            for handle in self._handles:
                if not self._sftp.is_usable:
                    return
                self._sftp.close(handle, doing=f"closing files of {self._path}")


@contextmanager
def open_directory(place: SourcePlace, path: PurePosixPath) -> Iterator[SshDirectory]:
    """The directory at `path`, not looked at yet, for the body. Raises HostError."""
    with place.sessions.session() as sftp:
        directory = SshDirectory(place, path, sftp=sftp)
        try:
            yield directory
        finally:
            directory.close()


@contextmanager
def open_source(place: SourcePlace, path: PurePosixPath) -> Iterator[SshSource]:
    """Open `path` for the body. Raises CheckpointError where it is missing or no plain file, StorageError, HostError."""
    with open_directory(place, path.parent) as directory:
        yield directory.open_path(path)
