"""A checkpoint at the host where it lies, read through any number of broken links as if there were none.

After a break its files are opened anew and must be the ones that they were (inode, size, time to the nanosecond); what was
foreseen is asked for again from where reading stopped.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any, Self, TypeVar

from dflash_model.checkpoint.directory import ByteDirectory
from dflash_model.checkpoint.source import ByteSource, foresee, read_many, refuse_change
from dflash_model.errors import HostError, SourceChanged
from tasks.remote.host import Host
from tasks.remote.patience import Patience

WAIT = "Wait until the training run has finished writing it, then run again."
FIRST_PAUSE_S = 0.5
T = TypeVar("T")


class RangeDigests:
    """sha256 of every stretch of a file that was read without a gap."""

    def __init__(self) -> None:
        self._done: list[tuple[int, int, str]] = []
        self._begin = self._end = 0
        self._digest = hashlib.sha256()

    def update(self, offset: int, data: bytes) -> None:
        """`data` was read from `offset`."""
        if offset != self._end:
            self._close()
            self._begin, self._digest = offset, hashlib.sha256()
        self._digest.update(data)
        self._end = offset + len(data)

    def so_far(self) -> list[tuple[int, int, str]]:
        """(offset, size, sha256) of each stretch, in the order in which they were read."""
        now = [(self._begin, self._end - self._begin, self._digest.copy().hexdigest())] if self._end > self._begin else []
        return [*self._done, *now]

    def _close(self) -> None:
        if self._end > self._begin:
            self._done.append((self._begin, self._end - self._begin, self._digest.hexdigest()))
        self._begin, self._digest = self._end, hashlib.sha256()


@dataclass(slots=True)
class _Foreseen:
    """A read to come: from `offset` to `end` of a file."""

    file: OriginFile
    offset: int
    end: int


class Origin:
    """The files of one checkpoint (a ByteDirectory), for one thread."""

    def __init__(self, host: Host, path: PurePosixPath, *, is_dir: bool, check: Callable[[], None]) -> None:
        """`path`: the checkpoint file, or the directory of all its files. `check` may raise while a broken link is waited for."""
        self._host = host
        self._path = path
        self._is_dir = is_dir
        self._check = check
        self._stack = ExitStack()
        self._directory: ByteDirectory | None = None
        self._files: dict[str, OriginFile] = {}
        self._foreseen: deque[_Foreseen] = deque()
        self._is_open = False
        self.bytes_read = 0
        self.records = False
        """True: the sha256 of every stretch that is read is kept, see `digests`."""

    @property
    def name(self) -> str:
        """host:path."""
        return f"{self._host.name}:{self._path}"

    def names(self) -> list[str]:
        """Sorted names of its files."""
        return self.patiently(lambda: self._in_directory().names())

    def open(self, name: str) -> OriginFile:
        """The file `name`; asked twice, the same source. Raises CheckpointError, HostError."""
        if name not in self._files:
            inner = self.patiently(lambda: self._open_inner(name))
            self._files[name] = OriginFile(self, name, inner)
        return self._files[name]

    def open_single(self) -> OriginFile:
        """The one file that this checkpoint is."""
        return self.open(self._path.name)

    @property
    def opened(self) -> frozenset[str]:
        """Names of the files that were opened so far."""
        return frozenset(self._files)

    def patiently(self, action: Callable[[], T]) -> T:
        """What `action` returns; HostErrors are waited out once the files have been reached. Raises EvalError."""

        def attempt() -> T:
            if not self._is_open:
                self._open_all()
            try:
                return action()
            except HostError:
                self._is_open = False
                raise

        if not self._files:  # nothing has been reached yet: a host that is down is no broken link
            return attempt()
        what = f"[{self._host.name}] reading {self._path}"
        return Patience(what, grace_s=self._host.grace_s, first_pause_s=FIRST_PAUSE_S, check=self._check).call(attempt)

    def expect(self, ranges: Sequence[tuple[ByteSource, int, int]]) -> None:
        """The reads that come next, in order."""
        own = [(file, offset, size) for file, offset, size in ranges if isinstance(file, OriginFile)]
        self._foreseen = deque(_Foreseen(file, offset, offset + size) for file, offset, size in own if size)
        self.patiently(self._foresee)

    def note_read(self, file: OriginFile, offset: int, size: int) -> None:
        """Count a read, and step on in what was foreseen."""
        self.bytes_read += size
        first = self._foreseen[0] if self._foreseen else None
        if first is not None and first.file is file and first.offset == offset:
            first.offset += size
            if first.offset >= first.end:
                self._foreseen.popleft()

    def refuse_change(self) -> None:
        """Raise SourceChanged if any file that was opened is not what it was."""
        for file in self._files.values():
            self.patiently(lambda file=file: refuse_change(file.inner))  # type: ignore[misc]

    def reads(self) -> list[tuple[str, int, int, str]]:
        """(file, offset, size, sha256) of each stretch that was read since `records` was set."""
        return [(name, *stretch) for name, file in self._files.items() for stretch in file.digests.so_far()]

    def hash_file(self, name: str) -> str:
        """sha256 of a file, computed on its host. Raises SourceChanged where it is not the one that was opened."""
        digest = self.patiently(lambda: self._host.sha256(self.path_of(name)))
        self.patiently(lambda: refuse_change(self._files[name].inner))
        return digest

    def path_of(self, name: str) -> PurePosixPath:
        """Where a file lies."""
        return self._path / name if self._is_dir else self._path

    def _open_all(self) -> None:
        """Open what was open before, if it still is the same. Raises SourceChanged."""
        self._close()
        self._stack = ExitStack()
        if self._is_dir:
            self._directory = self._stack.enter_context(self._host.open_directory(self._path))
        for name, file in self._files.items():
            inner = self._open_inner(name)
            if _identity(inner) != file.identity:
                raise SourceChanged(f"{file.name} changed while the link to it was broken.", WAIT)
            file.inner = inner
        self._is_open = True
        self._foresee()

    def _open_inner(self, name: str) -> ByteSource:
        if self._is_dir:
            return self._in_directory().open(name)
        return self._stack.enter_context(self._host.open_source(self._path))

    def _in_directory(self) -> ByteDirectory:
        assert self._directory is not None
        return self._directory

    def _foresee(self) -> None:
        foresee([(one.file.inner, one.offset, one.end - one.offset) for one in self._foreseen])

    def _close(self) -> None:
        self._is_open = False
        self._directory = None
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()


class OriginFile:
    """One file of an Origin (a ByteSource)."""

    def __init__(self, origin: Origin, name: str, inner: ByteSource) -> None:
        self._origin = origin
        self._file_name = name
        self.inner = inner
        self.identity = _identity(inner)
        self.digests = RangeDigests()
        self.name = inner.name
        self.size_bytes = inner.size_bytes

    def read_at(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`. Raises CheckpointError where the file has fewer, HostError."""
        data = self._origin.patiently(lambda: self.inner.read_at(offset, size))
        self._note(offset, data)
        return data

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """`read_at` of every (offset, size), in one round trip."""
        answers = self._origin.patiently(lambda: read_many(self.inner, ranges))
        for (offset, _), data in zip(ranges, answers, strict=True):
            self._note(offset, data)
        return answers

    def expect(self, ranges: Sequence[tuple[ByteSource, int, int]]) -> None:
        """The reads that come next, of this and other files of the checkpoint."""
        self._origin.expect(ranges)

    def sha256(self) -> str:
        """sha256 of the whole file, computed on its host."""
        return self._origin.hash_file(self._file_name)

    def _note(self, offset: int, data: bytes) -> None:
        self._origin.note_read(self, offset, len(data))
        if self._origin.records:
            self.digests.update(offset, data)


def _identity(source: Any) -> tuple[int, int, int]:
    """(inode, size, mtime_ns): LocalFile and SshSource have all three."""
    return source.inode, source.size_bytes, source.mtime_ns
