"""LocalHost: a directory of this machine that stands for a machine. Same interface as a host over SSH."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePosixPath
from typing import IO, Any

from dflash_model.artifacts import Manifest
from dflash_model.checkpoint.directory import ByteDirectory, LocalDirectory
from dflash_model.checkpoint.source import ByteSource, LocalFile
from dflash_model.digests import file_digest
from dflash_model.errors import EvalError, from_os_error
from dflash_model.stages.protocol import Request
from dflash_model.storage import find_artifact, write_json
from tasks.remote import failures
from tasks.remote.environment import key_variables, stage_variables
from tasks.remote.host import BLOCK_BYTES, FileFacts, OnEvent, StageRun
from tasks.remote.processes import run_child

log = logging.getLogger(__name__)

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "HF_HOME", "HF_TOKEN", "VIRTUAL_ENV",
             "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # fmt: skip
"""The only variables that a stage program inherits; Prefect's never."""


class LocalHost:
    """A work directory on this machine."""

    def __init__(self, name: str, work_dir: Path, *, threads: int, slots: int, python: str = sys.executable) -> None:
        self.name = name
        self.work_dir = PurePosixPath(work_dir)
        self._threads = threads
        self._slots = threading.BoundedSemaphore(slots)
        self._python = python

        self.connections, self.grace_s = 1, 0.0

    def beside(self) -> LocalHost:
        """Itself: there is no connection."""
        return self

    def stat(self, path: PurePosixPath) -> FileFacts | None:
        """Facts of a file or directory, None where there is nothing."""
        try:
            found = os.stat(path)  # noqa: PTH116 - the path is a PurePosixPath by contract
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise self._translated(exc, f"looking at {path}") from exc
        is_dir = Path(path).is_dir()
        return FileFacts(path=path, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, inode=found.st_ino, is_dir=is_dir)

    def glob(self, pattern: str) -> list[FileFacts]:
        """Facts of everything that matches a shell pattern; relative patterns start at the work directory."""
        anchor = Path("/") if pattern.startswith("/") else Path(self.work_dir)
        found = [self.stat(PurePosixPath(path)) for path in sorted(anchor.glob(pattern.lstrip("/")))]
        return [facts for facts in found if facts is not None]

    def open_source(self, path: PurePosixPath) -> AbstractContextManager[ByteSource]:
        """Random read access to one file, opened once."""
        return LocalFile(Path(path))

    def open_directory(self, path: PurePosixPath) -> AbstractContextManager[ByteDirectory]:
        """Random read access to the files of one directory, each opened once."""
        return LocalDirectory(Path(path))

    def read_blocks(self, path: PurePosixPath, *, offset: int = 0) -> Iterator[bytes]:
        """The file's bytes from `offset` on, in order."""
        try:
            with Path(path).open("rb") as file:
                file.seek(offset)
                while block := file.read(BLOCK_BYTES):
                    yield block
        except OSError as exc:
            raise self._translated(exc, f"reading {path}") from exc

    def write_blocks(self, path: PurePosixPath, blocks: Iterable[bytes], *, offset: int = 0, keep: bool = False) -> None:
        """Create or replace a file, or go on behind its first `offset` bytes; synced when this returns. Parents are made."""
        local = Path(path)
        try:
            local.parent.mkdir(parents=True, exist_ok=True)
            with local.open("r+b" if offset else "wb") as file:
                file.seek(offset)
                file.truncate()
                for block in blocks:
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
        except OSError as exc:
            if not keep and not local.is_dir():
                local.unlink(missing_ok=True)
            raise self._translated(exc, f"writing {path}") from exc
        except EvalError:
            if not keep and not local.is_dir():
                local.unlink(missing_ok=True)
            raise

    def sha256(self, path: PurePosixPath) -> str:
        """sha256 of a file."""
        try:
            return file_digest(Path(path))
        except OSError as exc:
            raise self._translated(exc, f"reading {path}") from exc

    def range_sha256(self, path: PurePosixPath, ranges: Sequence[tuple[int, int]]) -> list[str] | None:
        """sha256 of each (offset, size) of a file."""
        try:
            with Path(path).open("rb") as file:
                return [_digest_of(file, offset, size) for offset, size in ranges]
        except OSError as exc:
            raise self._translated(exc, f"reading {path}") from exc

    def join(self, path: PurePosixPath, others: Sequence[PurePosixPath]) -> None:
        """Append the content of `others`, in order, to the file at `path`, and remove each once it is."""
        try:
            for other in others:
                with Path(path).open("ab") as whole, Path(other).open("rb") as part:
                    shutil.copyfileobj(part, whole, BLOCK_BYTES)
                    whole.flush()
                    os.fsync(whole.fileno())
                Path(other).unlink()
        except OSError as exc:
            raise self._translated(exc, f"joining {path}") from exc

    def rename(self, path: PurePosixPath, to: PurePosixPath) -> None:
        """Atomic rename."""
        try:
            Path(to).parent.mkdir(parents=True, exist_ok=True)
            Path(path).replace(Path(to))
        except OSError as exc:
            raise self._translated(exc, f"renaming {path} to {to}") from exc

    def remove(self, path: PurePosixPath) -> None:
        """Remove a file or a whole directory; nothing there is fine."""
        local = Path(path)
        try:
            if local.is_dir() and not local.is_symlink():
                shutil.rmtree(local)
            else:
                local.unlink(missing_ok=True)
        except OSError as exc:
            raise self._translated(exc, f"removing {path}") from exc

    def free_bytes(self) -> int:
        """Free space at the work directory."""
        try:
            Path(self.work_dir).mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self.work_dir).free
        except OSError as exc:
            raise self._translated(exc, f"asking for free space at {self.work_dir}") from exc

    def find_artifact(self, key: str) -> Manifest | None:
        """The manifest of `key` when it and its parts are complete here, else None."""
        return find_artifact(Path(self.work_dir), key)

    def close(self) -> None:
        """Nothing is held open."""

    def run_stage(self, request: Request, *, log_path: Path, deadline_s: float, on_event: OnEvent) -> StageRun:
        """Run one stage program as a child process, at most `slots` at a time on this host."""
        what = f"[{self.name}] stage {request.stage}"
        run_dir = Path(self.work_dir) / "runs" / f"{request.key}-{uuid.uuid4().hex[:8]}"
        command = (self._python, "-m", "dflash_model.stages", request.stage, str(run_dir / "request.json"), "--parent-pipe")
        try:
            write_json(run_dir / "request.json", request.to_json())
            with self._slots:
                ended = run_child(
                    command,
                    env=self._environment(request.local),
                    cwd=run_dir,
                    log_path=log_path,
                    deadline_s=deadline_s,
                    on_event=on_event,
                    what=what,
                )
            if ended.exit_code != 0:
                raise failures.stage_failure(
                    _content(run_dir / "error.json"),
                    exit_code=ended.exit_code,
                    peak_rss_bytes=ended.peak_rss_bytes,
                    what=what,
                    log_path=log_path,
                )
        finally:
            shutil.rmtree(run_dir, ignore_errors=True)
        manifest = self.find_artifact(request.key)
        if manifest is None:
            raise failures.no_artifact(what, request.key, log_path)
        return StageRun(manifest=manifest, seconds=ended.seconds, peak_rss_bytes=ended.peak_rss_bytes)

    def _environment(self, local: dict[str, Any]) -> dict[str, str]:
        """Little is inherited; the variable with an engine's key only by the stage that asks that engine."""
        names = (*PASSED_ON, *key_variables(local))
        inherited = {name: os.environ[name] for name in names if name in os.environ}
        return inherited | stage_variables(self._threads, gpu=local.get("gpu"))

    def _translated(self, exc: OSError, doing: str) -> EvalError:
        return from_os_error(exc, f"[{self.name}] {doing}")


def _digest_of(file: IO[bytes], offset: int, size: int) -> str:
    """Of what the file has of that range."""
    digest = hashlib.sha256()
    file.seek(offset)
    while size and (block := file.read(min(size, BLOCK_BYTES))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
