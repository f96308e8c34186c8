"""SshHost: a machine reached over SSH. Same interface as LocalHost; its stages are run by whoever it is given for that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import Protocol

from dflash_model.artifacts import Manifest
from dflash_model.checkpoint.directory import ByteDirectory
from dflash_model.checkpoint.source import ByteSource
from dflash_model.stages.protocol import Request
from tasks.remote.connection import Connection
from tasks.remote.host import FileFacts, OnEvent, StageRun
from tasks.remote.inventory import GRACE_S
from tasks.remote.ssh_artifacts import find_artifact
from tasks.remote.ssh_files import SshFiles
from tasks.remote.throttle import Throttle


class StageRunner(Protocol):
    """Runs stage programs on one host."""

    def run(self, request: Request, *, log_path: Path, deadline_s: float, on_event: OnEvent) -> StageRun:
        """As Host.run_stage."""
        ...


class SshHost:
    """A work directory on a machine that SSH reaches. Every message begins with the host's name in brackets."""

    def __init__(
        self,
        connection: Connection,
        work_dir: PurePosixPath,
        *,
        runner: StageRunner,
        connections: int = 1,
        grace_s: float = GRACE_S,
        throttle: Throttle | None = None,
    ) -> None:
        """Nothing is connected before the first question. `work_dir` must be absolute.

        `connections`: how many a large transfer may use; `throttle`: limits the bytes a second of all of them together.
        """
        if not work_dir.is_absolute():
            raise ValueError(f"the work directory {work_dir} is not absolute")
        self.name = connection.name
        self.work_dir = work_dir
        self._connection = connection
        self.connections, self.grace_s = connections, grace_s
        self._throttle = throttle or Throttle(None)
        self._files = SshFiles(connection, throttle=self._throttle)
        self._runner = runner

    def beside(self) -> SshHost:
        """The same host over a connection of its own."""
        connection = Connection(self._connection.endpoint)
        return SshHost(connection, self.work_dir, runner=self._runner, grace_s=self.grace_s, throttle=self._throttle)

    def stat(self, path: PurePosixPath) -> FileFacts | None:
        """Facts of a file or directory, None where there is nothing."""
        return self._files.stat(path)

    def glob(self, pattern: str) -> list[FileFacts]:
        """Facts of everything that matches a shell pattern; relative patterns start at the work directory."""
        return self._files.glob(pattern, start=self.work_dir)

    def open_source(self, path: PurePosixPath) -> AbstractContextManager[ByteSource]:
        """Random read access to one file, opened once (when entered)."""
        return self._files.open_source(path)

    def open_directory(self, path: PurePosixPath) -> AbstractContextManager[ByteDirectory]:
        """Random read access to the files of one directory, each opened once."""
        return self._files.open_directory(path)

    def read_blocks(self, path: PurePosixPath, *, offset: int = 0) -> Iterator[bytes]:
        """The file's bytes from `offset` on, in order."""
        return self._files.read_blocks(path, offset=offset)

    def write_blocks(self, path: PurePosixPath, blocks: Iterable[bytes], *, offset: int = 0, keep: bool = False) -> None:
        """Create or replace a file, or go on behind its first `offset` bytes; synced when this returns. Parents are made."""
        self._files.write_blocks(path, blocks, offset=offset, keep=keep)

    def sha256(self, path: PurePosixPath) -> str:
        """sha256 of a file, computed on its host."""
        return self._files.sha256(path)

    def range_sha256(self, path: PurePosixPath, ranges: Sequence[tuple[int, int]]) -> list[str] | None:
        """sha256 of each (offset, size) of a file, computed on its host; None where that has no program for it."""
        return self._files.range_sha256(path, ranges)

    def join(self, path: PurePosixPath, others: Sequence[PurePosixPath]) -> None:
        """Append the content of `others`, in order, to the file at `path`, and remove each once it is."""
        self._files.join(path, others)

    def rename(self, path: PurePosixPath, to: PurePosixPath) -> None:
        """Atomic rename; an existing file at `to` is replaced, an existing directory is an error."""
        self._files.rename(path, to)

    def remove(self, path: PurePosixPath) -> None:
        """Remove a file or a whole directory; nothing there is fine."""
        self._files.remove(path)

    def free_bytes(self) -> int:
        """Free space at the work directory."""
        return self._files.free_bytes(self.work_dir)

    def find_artifact(self, key: str) -> Manifest | None:
        """The manifest of `key` when it and its parts are complete there, else None. Raises HostError where nobody answers."""
        return find_artifact(self._files.shell, self.work_dir / "artifacts", key)

    def run_stage(self, request: Request, *, log_path: Path, deadline_s: float, on_event: OnEvent) -> StageRun:
        """Run one stage program to its end; its log goes to `log_path` on the relay."""
        return self._runner.run(request, log_path=log_path, deadline_s=deadline_s, on_event=on_event)

    def close(self) -> None:
        """End the connection; a later question opens it anew."""
        self._files.close()
        self._connection.close()
