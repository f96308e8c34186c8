"""SshSource: a file on a host as a ByteSource. One SFTP handle, opened once: a file that takes its name later is not read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import PurePosixPath

from dflash_model.checkpoint.source import check_range
from dflash_model.errors import CheckpointError, EvalError
from tasks.remote.host import FileFacts
from tasks.remote.sftp import Sftp
from tasks.remote.sftp_sessions import SftpSessions
from tasks.remote.ssh_facts import SshFacts


class SshSource:
    """Random access to one file of a host, for one thread at a time."""

    def __init__(self, host: str, facts: FileFacts, *, sftp: Sftp, handle: bytes, looking: SshFacts) -> None:
        self._host = host
        self._facts = facts
        self._sftp = sftp
        self._handle = handle
        self._looking = looking

    @property
    def name(self) -> str:
        """host:path."""
        return f"{self._host}:{self._facts.path}"

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

    def read_at(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`. Raises CheckpointError where the file has fewer, HostError."""
        return self.read_many([(offset, size)])[0]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """`read_at` of every (offset, size), all in flight together."""
        for offset, size in ranges:
            check_range(self, offset, size)
        answers = self._sftp.read(self._handle, ranges, doing=f"reading {self._facts.path}")
        for (offset, size), answer in zip(ranges, answers, strict=True):
            if len(answer) != size:
                raise CheckpointError(
                    f"[{self._host}] {self._facts.path} was cut short while it was read: nothing is left at byte {offset + len(answer)}.",
                    "Wait until the training run has finished writing it, then run again.",
                )
        return answers

    def changed(self) -> str | None:
        """A sentence if the path now names another file, or this file was written to since it was opened; else None."""
        then, seen = self._facts, self._looking.see(self._facts.path)
        what = f"[{self._host}] {then.path}"
        if seen is None:
            return f"{what} was removed while it was read."
        now = seen.facts
        if now.inode != then.inode:
            return f"{what} was replaced by another file while it was read."
        if now.size_bytes != then.size_bytes:
            return f"{what} changed its size from {then.size_bytes} to {now.size_bytes} bytes while it was read."
        return f"{what} was written to while it was read." if now.mtime_ns != then.mtime_ns else None


@contextmanager
def open_source(host: str, path: PurePosixPath, *, sessions: SftpSessions, looking: SshFacts) -> Iterator[SshSource]:
    """Open `path` on `host` for the body. Raises CheckpointError where it is missing or no plain file, StorageError, HostError."""
    seen = looking.see(path)
    if seen is None:
        raise CheckpointError(
            f"[{host}] there is no checkpoint at {path}.", "Check the path, and whether the training run has written it yet."
        )
    if not seen.is_regular:  # looked at before it is opened: opening a named pipe would wait for a writer
        raise CheckpointError(f"[{host}] {path} is not a regular file.", "Give the path of a checkpoint file.")
    with sessions.session() as sftp:
        handle = sftp.open(path)
        try:
            # Its size may have moved since: the one of the open file counts, and changed() sees the difference in time.
            size = sftp.fstat(handle, doing=f"looking at {path}").size_bytes
            yield SshSource(host, replace(seen.facts, size_bytes=size), sftp=sftp, handle=handle, looking=looking)
        finally:
            if sftp.is_usable:
                with contextlib.suppress(EvalError):
                    sftp.close(handle, doing=f"closing {path}")
