"""Where drafters wait on a host until they are extracted: `<work dir>/incoming/<name of checkpoint and selection>/`."""

from __future__ import annotations

import json
import logging
import time
from pathlib import PurePosixPath
from typing import Any

from dflash_model.checkpoint.extracted import EXTRACTED_NAME, WEIGHTS_NAME, Extracted
from dflash_model.errors import EvalError, StorageError
from tasks.remote.drafters import RemoteDrafter
from tasks.remote.host import Host
from tasks.remote.selection import Selection

log = logging.getLogger(__name__)

ABANDONED_S = 24 * 3600.0
"""A part that nobody has written to for so long is nobody's any more."""

MAX_NOTES_BYTES = 64 << 20


def incoming_path(drafter: RemoteDrafter, selection: Selection, host: Host) -> PurePosixPath:
    """Where the drafter is for `host`: its own place if it lies there, else below incoming/."""
    if drafter.host == host.name:
        return PurePosixPath(drafter.path)
    return host.work_dir / "incoming" / selection.name_for(drafter.digest)


def local_facts(drafter: RemoteDrafter, selection: Selection, host: Host) -> dict[str, Any]:
    """What the stage extract-weights on `host` is told of where the drafter lies."""
    return {"path": str(incoming_path(drafter, selection, host)), "extracted": drafter.host != host.name}


def read_extracted(drafter: RemoteDrafter, selection: Selection, host: Host) -> Extracted | None:
    """What arrived, None where it has not (completely). Raises HostError where `host` cannot be asked."""
    directory = incoming_path(drafter, selection, host)
    if host.stat(directory / EXTRACTED_NAME) is None:
        return None
    content = b""
    for block in host.read_blocks(directory / EXTRACTED_NAME):
        content += block
        if len(content) > MAX_NOTES_BYTES:
            return None
    try:
        found = Extracted.from_json(json.loads(content), where=f"[{host.name}] {directory / EXTRACTED_NAME}")
    except (ValueError, StorageError):
        return None
    weights = host.stat(directory / WEIGHTS_NAME)
    return found if weights is not None and weights.size_bytes == found.report.bytes_written else None


def has_arrived(drafter: RemoteDrafter, selection: Selection, host: Host) -> bool:
    """True when the drafter lies on `host`, or has been brought there."""
    return drafter.host == host.name or read_extracted(drafter, selection, host) is not None


def drop_incoming(drafter: RemoteDrafter, selection: Selection, host: Host) -> None:
    """Remove what a relay brought, once it has been extracted. The drafter's own place is never touched."""
    if drafter.host != host.name:
        host.remove(incoming_path(drafter, selection, host))


def sweep_incoming(host: Host, *, keep: PurePosixPath) -> None:
    """Remove parts, and what lies beside them, that nobody will go on with; never `keep`. Errors are only logged."""
    try:
        for facts in host.glob("incoming/*/*.part*"):
            if facts.path.parent != keep and time.time() - facts.mtime_ns / 1e9 > ABANDONED_S:
                log.info("[%s] removing %s, abandoned", host.name, facts.path.parent)
                host.remove(facts.path.parent)
    except EvalError as exc:
        log.debug("%s", exc)
