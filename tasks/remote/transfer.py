"""Moving files and artifacts from host to host through the relay: streamed, hashed on the way, checked at the end, renamed.

No copy is made on the relay's disk. A destination never shows half a file or half an artifact.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from dflash_model.artifacts import FileEntry, Manifest
from dflash_model.digests import canonical_json
from dflash_model.errors import ArtifactLost, CheckpointError, HostFull, StorageError
from dflash_model.storage import MANIFEST_NAME
from tasks.remote.host import Host

log = logging.getLogger(__name__)

OnBytes = Callable[[int, int], None]
"""(bytes done, bytes in all)"""
SPARE_BYTES = 64 << 20


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
    """Copy one file to `to` by way of `to.part-<pid>`; returns its sha256.

    Raises HostFull where the destination has no room, StorageError where its copy differs, CheckpointError where the source changed
    size under way.
    """
    _require_room(destination, size_bytes)
    part = to.with_name(f"{to.name}.part-{os.getpid()}")
    digest = hashlib.sha256()
    done = 0

    def hashed() -> Iterator[bytes]:
        nonlocal done
        for block in source.read_blocks(path):
            digest.update(block)
            done += len(block)
            on_bytes(done, size_bytes)
            yield block

    try:
        destination.write_blocks(part, hashed())
        if done != size_bytes:
            raise CheckpointError(
                f"[{source.name}] {path} changed while it was read: {done} bytes came, {size_bytes} were announced.",
                "Wait until it is written completely, then run again.",
            )
        streamed = digest.hexdigest()
        written = destination.sha256(part)
        if written != streamed or (sha256 is not None and streamed != sha256):
            raise StorageError(
                f"{path} from {source.name} arrived on {destination.name} with sha256 {written[:12]}.., "
                f"expected {(sha256 or streamed)[:12]}...",
                "Run again; if it repeats, check the disk and memory of both hosts.",
            )
        destination.rename(part, to)
        return streamed
    finally:
        destination.remove(part)


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
    part_dir = final.with_name(f"{final.name}.part-{os.getpid()}")
    origin = artifact_path(source, manifest.key)
    try:
        for entry in manifest.files:
            moved += _copy_entry(entry, source, origin, destination, part_dir, on_bytes)
        content = canonical_json(manifest.to_json())
        destination.write_blocks(part_dir / MANIFEST_NAME, [content])
        destination.remove(final)
        destination.rename(part_dir, final)
    finally:
        destination.remove(part_dir)
    log.info("moved %s from %s to %s, %d bytes", manifest.key, source.name, destination.name, moved)
    return moved


def _copy_entry(
    entry: FileEntry, source: Host, origin: PurePosixPath, destination: Host, part_dir: PurePosixPath, on_bytes: OnBytes
) -> int:
    path, to = origin / entry.name, part_dir / entry.name
    copy_file(source, path, destination, to, size_bytes=entry.size_bytes, sha256=entry.sha256, on_bytes=on_bytes)
    return entry.size_bytes


def artifact_path(host: Host, key: str) -> PurePosixPath:
    """Where `key` lies on `host`."""
    return host.work_dir / "artifacts" / key


def _require_room(destination: Host, size_bytes: int) -> None:
    free = destination.free_bytes()
    if free < size_bytes + SPARE_BYTES:
        raise HostFull(
            f"[{destination.name}] {free / 2**20:.0f} MiB are free at {destination.work_dir}, "
            f"{(size_bytes + SPARE_BYTES) / 2**20:.0f} MiB are needed ({SPARE_BYTES >> 20} of them in reserve).",
            "Free space there, or name another host.",
        )
