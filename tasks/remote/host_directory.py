"""A directory of a host as the checkpoint readers want it: names, and one source a file, opened on demand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import PurePosixPath

from dflash_model.checkpoint.directory import check_plain_name
from dflash_model.checkpoint.source import ByteSource
from tasks.remote.host import Host, literal_pattern


class HostDirectory:
    """The files of one directory of a host."""

    def __init__(self, host: Host, path: PurePosixPath, stack: ExitStack) -> None:
        self.name = f"[{host.name}] {path}"
        self._host, self._path, self._stack = host, path, stack
        self._open: dict[str, ByteSource] = {}

    def names(self) -> list[str]:
        """Sorted names of its files."""
        found = self._host.glob(f"{literal_pattern(self._path)}/*")
        return sorted(facts.path.name for facts in found if not facts.is_dir)

    def open(self, name: str) -> ByteSource:
        """The file `name`; asked twice, the same source. Raises CheckpointError where it is missing."""
        if name not in self._open:
            path = self._path / check_plain_name(name, self.name)
            self._open[name] = self._stack.enter_context(self._host.open_source(path))
        return self._open[name]


@contextmanager
def open_directory(host: Host, path: PurePosixPath) -> Iterator[HostDirectory]:
    """The directory at `path`; its files are closed together."""
    with ExitStack() as stack:
        yield HostDirectory(host, path, stack)
