"""Directories whose manifest comes last, and files that appear whole or not at all.

A reader never sees half an artifact: everything is written to a part beside it (see parts.py), synced and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dflash_model.artifacts import FileEntry, Manifest
from dflash_model.digests import file_digest
from dflash_model.errors import EvalError, StorageError, from_os_error
from dflash_model.parts import STALE_AFTER_S, is_dead, part_name, writer_of

MANIFEST_NAME = "manifest.json"


def artifacts_dir(work_dir: Path) -> Path:
    """Where artifacts lie below a host's work directory."""
    return work_dir / "artifacts"


def write_file(path: Path, content: bytes) -> None:
    """Write a small file whole: a part beside it, fsync, rename. Raises EvalError."""
    part = path.with_name(part_name(path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise from_os_error(exc, f"writing {path}") from exc


def write_json(path: Path, value: Any) -> None:
    """`write_file` of an indented JSON value with a final newline."""
    write_file(path, (json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """A JSON file's value. Raises EvalError where it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    except ValueError as exc:
        raise StorageError(f"{path} is not JSON: {exc}.", "Delete it and run again.") from exc


class ArtifactWriter:
    """The directory of an artifact in the making, and the facts that its manifest will hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.made_by: dict[str, Any] = {}


@contextmanager
def writing_artifact(work_dir: Path, *, kind: str, key: str) -> Iterator[ArtifactWriter]:
    """Make artifact `key`: the body fills `writer.path`; on success manifest and rename follow, on error nothing stays.

    Parts of earlier, dead writers of the same key are removed first. If another writer finished the same key
    meanwhile, its artifact stays and ours is dropped. Raises EvalError.
    """
    root = artifacts_dir(work_dir)
    part = root / part_name(key)
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_dead_parts(root, key)
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        writer = ArtifactWriter(part)
        yield writer
        manifest = Manifest(
            kind=kind, key=key, files=describe_files(part), parts=writer.parts, facts=writer.facts, made_by=writer.made_by
        )
        write_json(part / MANIFEST_NAME, manifest.to_json())
        _publish(part, root / key, replace=find_artifact(work_dir, key) is None)
    except OSError as exc:
        raise from_os_error(exc, f"writing artifact {key} in {root}") from exc
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _publish(part: Path, final: Path, *, replace: bool) -> None:
    """Sync and rename. `replace`: what stands at `final`, if anything, is no complete artifact."""
    for file in part.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    if replace and final.exists():
        shutil.rmtree(final)
    try:
        part.rename(final)
    except OSError:
        if not _has_manifest(final):
            raise
    directory = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _has_manifest(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file()


def remove_dead_parts(root: Path, pattern: str) -> None:
    """Remove files and directories `<pattern>.part-*` below `root` (a glob) whose writer is gone, or untouched for a day if the
    name tells no writer that can be asked after."""
    for part in list(root.glob(f"{pattern}.part-*")):
        dead = is_dead(writer_of(part.name))
        if dead is None:
            with suppress(OSError):
                dead = time.time() - part.stat().st_mtime > STALE_AFTER_S
        if not dead:
            continue
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def sweep(work_dir: Path) -> None:
    """Remove what killed writers left in a work directory, where a run starts: nobody else would come by every name again."""
    for place in ("artifacts", "ledger", "samples", "incoming"):
        remove_dead_parts(work_dir / place, "**/*")


def describe_files(path: Path) -> tuple[FileEntry, ...]:
    """Name, size and sha256 of every file below `path` but the manifest, sorted by name."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != MANIFEST_NAME)
    return tuple(
        FileEntry(name=p.relative_to(path).as_posix(), size_bytes=p.stat().st_size, sha256=file_digest(p)) for p in files
    )


def read_manifest(path: Path) -> Manifest:
    """The manifest of the artifact directory `path`. Raises EvalError where there is none or it is damaged."""
    data = read_json(path / MANIFEST_NAME)
    try:
        return Manifest.from_json(data)
    except (ValueError, KeyError, TypeError) as exc:
        raise StorageError(f"{path} has a damaged manifest: {exc}.", f"Delete {path} and run again.") from exc


def find_artifact(work_dir: Path, key: str) -> Manifest | None:
    """The manifest of `key` if it and its parts are there with the right sizes, else None."""
    path = artifacts_dir(work_dir) / key
    if not _has_manifest(path):
        return None
    try:
        manifest = read_manifest(path)
        complete = all((path / f.name).stat().st_size == f.size_bytes for f in manifest.files)
    except (EvalError, OSError):
        return None
    if not complete:
        return None
    for part, digest in manifest.parts.items():
        found = find_artifact(work_dir, part)
        if found is None or found.digest != digest:
            return None
    return manifest


def verify_artifact(work_dir: Path, key: str) -> None:
    """Read every byte of `key` and its parts. Raises StorageError naming the first file that differs."""
    path = artifacts_dir(work_dir) / key
    manifest = read_manifest(path)
    for entry in manifest.files:
        try:
            actual = file_digest(path / entry.name)
        except OSError as exc:
            raise from_os_error(exc, f"verifying {path / entry.name}") from exc
        if actual != entry.sha256:
            raise StorageError(
                f"{path / entry.name} differs from its manifest (sha256 {actual[:12]}.., expected {entry.sha256[:12]}..).",
                f"Delete {path} and run again.",
            )
    for part in manifest.parts:
        verify_artifact(work_dir, part)
