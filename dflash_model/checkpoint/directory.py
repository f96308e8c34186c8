"""A checkpoint that is a directory: its file names, and a `ByteSource` for each file.

Names inside checkpoint files (shards of an index, items of a DCP) are foreign text: only plain names in the same
directory are opened, so a hostile index cannot reach other files.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from dflash_model.checkpoint.source import ByteSource, CountedSource, LocalFile
from dflash_model.errors import CheckpointError, from_os_error


class ByteDirectory(Protocol):
    """The files of one directory, without its subdirectories."""

    @property
    def name(self) -> str:
        """How messages call it: a path, with its host where it has one."""
        ...

    def names(self) -> list[str]:
        """Sorted names of its files. Raises CheckpointError where the directory is missing."""
        ...

    def open(self, name: str) -> ByteSource:
        """The file `name`; asked twice, the same source. Raises CheckpointError where it is missing."""
        ...


def check_plain_name(name: object, where: str) -> str:
    """`name` if it is a plain file name. Raises CheckpointError, saying that `where` named it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        shown = f"{name[:80]!r}" if isinstance(name, str) else "something that is not text"
        raise CheckpointError(
            f"{where} points at {shown}, which is not a plain file name in the same directory.",
            "Use a checkpoint whose files lie side by side in one directory.",
        )
    return name


class LocalDirectory:
    """A local directory; files are opened on demand and closed together."""

    def __init__(self, path: Path) -> None:
        """The directory at `path`, not looked at yet."""
        self.path = path
        self._files: dict[str, LocalFile] = {}
        self._stack = ExitStack()

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    def names(self) -> list[str]:
        """Sorted names of its regular files. Raises CheckpointError where the directory is missing."""
        if not self.path.is_dir():
            raise CheckpointError(f"There is no checkpoint directory at {self.path}.", "Check the path.")
        try:
            return sorted(entry.name for entry in self.path.iterdir() if entry.is_file())
        except OSError as exc:
            raise from_os_error(exc, f"listing {self.path}") from exc

    def open(self, name: str) -> LocalFile:
        """The file `name`; asked twice, the same source. Raises CheckpointError where it is missing."""
        if name not in self._files:
            plain = check_plain_name(name, self.name)
            self._files[name] = self._stack.enter_context(LocalFile(self.path / plain))
        return self._files[name]

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close every file that was opened."""
        self._files.clear()
        self._stack.close()


class CountedDirectory:
    """A directory that passes everything on, and counts the bytes read from each file that was opened."""

    def __init__(self, directory: ByteDirectory) -> None:
        """Nothing is opened yet."""
        self._directory = directory
        self.name = directory.name
        self.opened: dict[str, CountedSource] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes read from all files."""
        return sum(source.bytes_read for source in self.opened.values())

    def names(self) -> list[str]:
        """The inner directory's answer."""
        return self._directory.names()

    def open(self, name: str) -> CountedSource:
        """The inner directory's file, counted."""
        if name not in self.opened:
            self.opened[name] = CountedSource(self._directory.open(name))
        return self.opened[name]
