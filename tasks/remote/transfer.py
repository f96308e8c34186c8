"""Moving files and artifacts from host to host through the relay: streamed, hashed on the way, checked at the end, renamed.

No copy is made on the relay's disk. A destination never shows half a file or half an artifact.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from dflash_model.artifacts import FileEntry, Manifest
from dflash_model.digests import canonical_json
from dflash_model.errors import ArtifactLost, CheckpointError, EvalError, HostError, HostFull, StorageError
from dflash_model.parts import part_name
from dflash_model.storage import MANIFEST_NAME
from tasks.remote.host import Host

log = logging.getLogger(__name__)

OnBytes = Callable[[int, int], None]
"""(bytes done, bytes in all)"""
SPARE_BYTES = 64 << 20
COPY_TRIES = 5
COPY_PAUSE_S = 1.0
"""Before the second try; doubled each time, fifteen seconds in all."""


def copy_file(
    source: Host,
    path: PurePosixPath,
    destination: Host,
    to: PurePosixPath,
    *,
    size_bytes: int,
    sha256: str | None,
    on_bytes: OnBytes,
) -> str:
    """Copy one file to `to` by way of a part beside it; returns its sha256. A cut link is waited for, and the copy goes on.

    Raises HostFull where the destination has no room, StorageError where its copy differs, CheckpointError where the source
    changed under way, HostError where a host stays away.
    """
    require_room(destination, size_bytes)
    part = to.with_name(part_name(to.name))
    copy = _Copy(source, path, destination, part, size_bytes=size_bytes, on_bytes=on_bytes)
    try:
        streamed = copy.run()
        expected = sha256 or streamed or source.sha256(path)
        written = destination.sha256(part)
        if written != expected or streamed not in (None, expected):
            raise StorageError(
                f"{path} from {source.name} arrived on {destination.name} with sha256 {written[:12]}.., expected {expected[:12]}...",
                "Run again; if it repeats, check the disk and memory of both hosts.",
            )
        destination.rename(part, to)
        return expected
    finally:
        remove_quietly(destination, part)


class _Copy:
    """One file on its way, over as many tries as it takes."""

    def __init__(
        self, source: Host, path: PurePosixPath, destination: Host, part: PurePosixPath, *, size_bytes: int, on_bytes: OnBytes
    ) -> None:
        self._source, self._path, self._destination, self._part = source, path, destination, part
        self._size_bytes, self._on_bytes = size_bytes, on_bytes
        self._done = 0
        self._facts = source.stat(path)

    def run(self) -> str | None:
        """Copy it all; the sha256 of what was streamed, None where it took more than one try. Raises EvalError."""
        digest = hashlib.sha256()
        for attempt in range(COPY_TRIES):
            try:
                if attempt:
                    self._done = self._arrived()
                self._destination.write_blocks(self._part, self._blocks(digest), offset=self._done, keep=True)
            except HostFull:
                raise
            except HostError as exc:
                if attempt == COPY_TRIES - 1:
                    raise
                log.warning(
                    "%s from %s to %s goes on after a break: %s",
                    self._path,
                    self._source.name,
                    self._destination.name,
                    exc.problem,
                )
                time.sleep(COPY_PAUSE_S * 2**attempt)
                continue
            self._require_whole()
            return digest.hexdigest() if attempt == 0 else None
        raise AssertionError

    def _blocks(self, digest: Any) -> Iterator[bytes]:
        for block in self._source.read_blocks(self._path, offset=self._done):
            digest.update(block)
            self._done += len(block)
            self._on_bytes(self._done, self._size_bytes)
            yield block

    def _arrived(self) -> int:
        """Bytes that the destination has. Raises CheckpointError where the source is not what it was."""
        now = self._source.stat(self._path)
        if now != self._facts:
            raise CheckpointError(
                f"[{self._source.name}] {self._path} changed while the link was down.",
                "Wait until it is written completely, then run again.",
            )
        part = self._destination.stat(self._part)
        return 0 if part is None else min(part.size_bytes, self._size_bytes)

    def _require_whole(self) -> None:
        if self._done != self._size_bytes:
            raise CheckpointError(
                f"[{self._source.name}] {self._path} changed while it was read: {self._done} bytes came, {self._size_bytes} were announced.",
                "Wait until it is written completely, then run again.",
            )


def copy_artifact(manifest: Manifest, source: Host, destination: Host, *, on_bytes: OnBytes) -> int:
    """Copy an artifact and its parts to `destination`; returns the bytes moved. What is there already is not moved."""
    if destination.find_artifact(manifest.key) is not None:
        return 0
    moved = 0
    for part in sorted(manifest.parts):
        part_manifest = source.find_artifact(part)
        if part_manifest is None:
            raise ArtifactLost(f"[{source.name}] part {part} of {manifest.key} is gone.", "Run again; it will be made anew.")
        moved += copy_artifact(part_manifest, source, destination, on_bytes=on_bytes)
    final = artifact_path(destination, manifest.key)
    part_dir = final.with_name(part_name(final.name))
    origin = artifact_path(source, manifest.key)
    try:
        for entry in manifest.files:
            moved += _copy_entry(entry, source, origin, destination, part_dir, on_bytes)
        content = canonical_json(manifest.to_json())
        destination.write_blocks(part_dir / MANIFEST_NAME, [content])
        destination.remove(final)
        destination.rename(part_dir, final)
    finally:
        remove_quietly(destination, part_dir)
    log.info("moved %s from %s to %s, %d bytes", manifest.key, source.name, destination.name, moved)
    return moved


def _copy_entry(
    entry: FileEntry, source: Host, origin: PurePosixPath, destination: Host, part_dir: PurePosixPath, on_bytes: OnBytes
) -> int:
    path, to = origin / entry.name, part_dir / entry.name
    copy_file(source, path, destination, to, size_bytes=entry.size_bytes, sha256=entry.sha256, on_bytes=on_bytes)
    return entry.size_bytes


def remove_quietly(host: Host, path: PurePosixPath) -> None:
    """Remove what an error left, without hiding that error behind a host that is not there now."""
    try:
        host.remove(path)
    except EvalError as exc:
        log.warning("left behind, for now: %s", exc.problem)


def artifact_path(host: Host, key: str) -> PurePosixPath:
    """Where `key` lies on `host`."""
    return host.work_dir / "artifacts" / key


def require_room(destination: Host, size_bytes: int) -> None:
    """Raise HostFull unless so many bytes fit, and some in reserve."""
    free = destination.free_bytes()
    if free < size_bytes + SPARE_BYTES:
        raise HostFull(
            f"[{destination.name}] {free / 2**20:.0f} MiB are free at {destination.work_dir}, "
            f"{(size_bytes + SPARE_BYTES) / 2**20:.0f} MiB are needed ({SPARE_BYTES >> 20} of them in reserve).",
            "Free space there, or name another host.",
        )
