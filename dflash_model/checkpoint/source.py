"""Where a checkpoint's bytes come from: a local file, a window of one, or (elsewhere) a file on another host.

A reader never opens a path itself: it asks a `ByteSource` for ranges, so that one reader serves local disks and SFTP.
A source's size is taken once; whether the file changed since is asked at the end, through `changed()`.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from dflash_model.errors import CheckpointError, EvalError, SourceChanged, from_os_error

BLOCK_BYTES = 4 << 20
"""How much of a large range is read at once; a multiple of every item size."""


class ByteSource(Protocol):
    """A file of known size whose ranges can be read in any order."""

    @property
    def name(self) -> str:
        """How messages call it: a path, with its host where it has one."""
        ...

    @property
    def size_bytes(self) -> int:
        """Size when it was opened."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`. Raises CheckpointError where the file has fewer."""
        ...


@runtime_checkable
class BatchedSource(Protocol):
    """A source that answers many ranges in one round trip; remote sources should be one."""

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """`read_at` of every (offset, size), in order."""
        ...


@runtime_checkable
class WatchedSource(Protocol):
    """A source that can tell whether its file was replaced or written to since it was opened."""

    def changed(self) -> str | None:
        """A sentence on what changed, or None."""
        ...


@runtime_checkable
class ForeseeingSource(Protocol):
    """A source that can fetch ahead what it knows will be read."""

    def expect(self, ranges: Sequence[tuple[ByteSource, int, int]]) -> None:
        """(source, offset, size) of the reads that come next, in order; the sources are of the same kind and place as this one."""
        ...


@runtime_checkable
class HashedSource(Protocol):
    """A source whose host can hash the file where it lies."""

    def sha256(self) -> str:
        """sha256 (hex) of the whole file."""
        ...


def foresee(ranges: Sequence[tuple[ByteSource, int, int]]) -> None:
    """Tell the sources of one checkpoint what will be read next, in order. A hint: reading otherwise is only slower."""
    if ranges and isinstance(ranges[0][0], ForeseeingSource):
        ranges[0][0].expect(ranges)


def read_many(source: ByteSource, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """The bytes of every (offset, size), in one round trip where the source can. Raises CheckpointError."""
    if isinstance(source, BatchedSource):
        return source.read_many(ranges)
    return [source.read_at(offset, size) for offset, size in ranges]


def read_blocks(source: ByteSource, offset: int, size: int) -> Iterator[bytes]:
    """The range in blocks of BLOCK_BYTES; all but the last are of that size. Raises CheckpointError."""
    for begin in range(offset, offset + size, BLOCK_BYTES):
        yield source.read_at(begin, min(BLOCK_BYTES, offset + size - begin))


def refuse_change(source: ByteSource) -> None:
    """Raise SourceChanged if the source says that its file changed since it was opened."""
    change = source.changed() if isinstance(source, WatchedSource) else None
    if change is not None:
        raise SourceChanged(change, "Wait until the training run has finished writing it, then run again.")


def check_range(source: ByteSource, offset: int, size: int) -> None:
    """Raise CheckpointError unless [offset, offset + size) lies inside the source."""
    if offset < 0 or size < 0 or offset + size > source.size_bytes:
        raise CheckpointError(
            f"{source.name} ends early: bytes {offset} to {offset + size} are wanted, it has {source.size_bytes}.",
            "It is truncated or still being written; use a complete checkpoint.",
        )


class LocalFile:
    """A local file, opened once: if another file takes its name meanwhile, the old one is read to the end."""

    def __init__(self, path: Path) -> None:
        """Open `path`. Raises CheckpointError where it is missing or no regular file, StorageError where it is not readable."""
        self.path = path
        try:
            # O_NONBLOCK: opening a named pipe must not wait for a writer. It means nothing for a regular file.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as exc:
            raise _translate(exc, path) from exc
        # Also closes a file that is forgotten, without which every abandoned table would cost a descriptor.
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._stat = os.fstat(self._descriptor)
        if not stat.S_ISREG(self._stat.st_mode):
            self.close()
            raise CheckpointError(f"{path} is not a regular file.", "Give the path of a checkpoint file.")

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def size_bytes(self) -> int:
        """Size when it was opened."""
        return self._stat.st_size

    @property
    def inode(self) -> int:
        """Inode number when it was opened."""
        return self._stat.st_ino

    @property
    def mtime_ns(self) -> int:
        """Modification time when it was opened, in nanoseconds."""
        return self._stat.st_mtime_ns

    def read_at(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`. Raises CheckpointError where the file has fewer, StorageError on I/O errors."""
        check_range(self, offset, size)
        parts: list[bytes] = []
        done = 0
        try:
            while done < size:
                part = os.pread(self._descriptor, size - done, offset + done)
                if not part:
                    raise CheckpointError(
                        f"{self.name} was cut short while it was read: nothing is left at byte {offset + done}.",
                        "Wait until the training run has finished writing it, then run again.",
                    )
                parts.append(part)
                done += len(part)
        except OSError as exc:
            raise from_os_error(exc, f"reading {self.path}") from exc
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def changed(self) -> str | None:
        """A sentence if the path now names another file, or this file was written to since it was opened; else None."""
        try:
            by_path = self.path.stat()
        except FileNotFoundError:
            return f"{self.name} was removed while it was read."
        except OSError as exc:
            raise from_os_error(exc, f"looking at {self.path}") from exc
        if (by_path.st_dev, by_path.st_ino) != (self._stat.st_dev, self._stat.st_ino):
            return f"{self.name} was replaced by another file while it was read."
        if by_path.st_size != self._stat.st_size:
            return f"{self.name} changed its size from {self._stat.st_size} to {by_path.st_size} bytes while it was read."
        if by_path.st_mtime_ns != self._stat.st_mtime_ns:
            return f"{self.name} was written to while it was read."
        return None

    def close(self) -> None:
        """Close the file; reading afterwards is an error. A second call does nothing."""
        self._close()
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file."""
        self.close()


class Window:
    """A range of another source that is read as a file of its own (an item of a DCP shard)."""

    def __init__(self, source: ByteSource, offset: int, *, size_bytes: int, name: str) -> None:
        """The `size_bytes` from `offset` on. Raises CheckpointError where the source has fewer."""
        check_range(source, offset, size_bytes)
        self._source = source
        self._offset = offset
        self.size_bytes = size_bytes
        self.name = name

    def read_at(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset` of the window. Raises CheckpointError where it has fewer."""
        check_range(self, offset, size)
        return self._source.read_at(self._offset + offset, size)


class CountedSource:
    """A source that passes everything on and counts the bytes that came back."""

    def __init__(self, source: ByteSource) -> None:
        """Count from zero."""
        self._source = source
        self.name = source.name
        self.size_bytes = source.size_bytes
        self.bytes_read = 0

    def read_at(self, offset: int, size: int) -> bytes:
        """The inner source's answer."""
        data = self._source.read_at(offset, size)
        self.bytes_read += len(data)
        return data

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The inner source's answers, in one round trip where it can."""
        answers = read_many(self._source, ranges)
        self.bytes_read += sum(map(len, answers))
        return answers

    def changed(self) -> str | None:
        """The inner source's answer; None where it cannot tell."""
        return self._source.changed() if isinstance(self._source, WatchedSource) else None


def _translate(exc: OSError, path: Path) -> EvalError:
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointError(
            f"There is no checkpoint at {path}.", "Check the path, and whether the training run has written it yet."
        )
    return from_os_error(exc, f"opening {path}")
