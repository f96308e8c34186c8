"""What a host can do for us, whatever lies between: files below paths, stage programs, nothing else.

Paths on a host are PurePosixPath. Every method raises EvalError; HostError means "this host, now", so another may do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from dflash_model.artifacts import Manifest
from dflash_model.checkpoint.directory import ByteDirectory
from dflash_model.checkpoint.source import ByteSource
from dflash_model.stages.protocol import Request

BLOCK_BYTES = 1 << 20
OnEvent = Callable[[dict[str, Any]], None]
"""Gets each JSON line of a stage program, parsed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileFacts:
    """What tells one version of a file from another without reading it."""

    path: PurePosixPath
    """Absolute path on its host."""

    size_bytes: int
    """Exact size."""

    mtime_ns: int
    """Modification time; whole seconds where the transport knows no more."""

    inode: int
    """Inode, or 0 where the transport does not tell."""

    is_dir: bool
    """True for a directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun:
    """One finished stage program."""

    manifest: Manifest
    """What it made."""

    seconds: float
    """Wall time, start of the process included."""

    peak_rss_bytes: int
    """Largest resident set of the program."""


def literal_pattern(path: PurePosixPath) -> str:
    """`path` as a glob pattern that matches itself only."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in str(path))


class Host(Protocol):
    """One machine, or one directory tree standing for a machine."""

    name: str
    work_dir: PurePosixPath
    connections: int
    """How many connections a large transfer may use at once."""

    grace_s: float
    """How long a broken link to it is waited for."""

    def beside(self) -> Host:
        """The same host over a connection of its own, which whoever asked for it closes."""
        ...

    def stat(self, path: PurePosixPath) -> FileFacts | None:
        """Facts of a file or directory, None where there is nothing."""
        ...

    def glob(self, pattern: str) -> list[FileFacts]:
        """Facts of everything that matches a shell pattern; relative patterns start at the work directory."""
        ...

    def open_source(self, path: PurePosixPath) -> AbstractContextManager[ByteSource]:
        """Random read access to one file, opened once."""
        ...

    def open_directory(self, path: PurePosixPath) -> AbstractContextManager[ByteDirectory]:
        """Random read access to the files of one directory, each opened once."""
        ...

    def read_blocks(self, path: PurePosixPath, *, offset: int = 0) -> Iterator[bytes]:
        """The file's bytes from `offset` on, in order."""
        ...

    def write_blocks(self, path: PurePosixPath, blocks: Iterable[bytes], *, offset: int = 0, keep: bool = False) -> None:
        """Create or replace a file; synced when this returns. Parent directories are made.

        `offset`: keep so many bytes of what is there and go on behind them. `keep`: what arrived before an error stays,
        for a later call to go on with; without it nothing stays.
        """
        ...

    def sha256(self, path: PurePosixPath) -> str:
        """sha256 of a file, computed on its host."""
        ...

    def range_sha256(self, path: PurePosixPath, ranges: Sequence[tuple[int, int]]) -> list[str] | None:
        """sha256 of each (offset, size) of a file, computed on its host; None where that has no program for it."""
        ...

    def join(self, path: PurePosixPath, others: Sequence[PurePosixPath]) -> None:
        """Append the content of `others`, in order, to the file at `path`, and remove each once it is. On an error some are left."""
        ...

    def rename(self, path: PurePosixPath, to: PurePosixPath) -> None:
        """Atomic rename; an existing file at `to` is replaced, an existing directory is an error."""
        ...

    def remove(self, path: PurePosixPath) -> None:
        """Remove a file or a whole directory; nothing there is fine."""
        ...

    def free_bytes(self) -> int:
        """Free space at the work directory."""
        ...

    def find_artifact(self, key: str) -> Manifest | None:
        """The manifest of `key` when it and its parts are complete there, else None."""
        ...

    def close(self) -> None:
        """Give up connections; the next question opens them anew."""
        ...

    def run_stage(self, request: Request, *, log_path: Path, deadline_s: float, on_event: OnEvent) -> StageRun:
        """Run one stage program to its end; its log goes to `log_path` on the relay."""
        ...
