"""Names for content: sha256 of files, of JSON values, and the keys of stages.

A key never holds a host name: the same inputs give the same key wherever the work runs.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> bytes:
    """One byte string per JSON value: sorted keys, no spaces, UTF-8; NaN and infinities are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def json_digest(value: Any) -> str:
    """sha256 (64 hex digits) of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 (64 hex digits) of a file's bytes, read in 1 MiB blocks. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(CHUNK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def stage_key(stage: str, version: int, inputs: dict[str, str], parameters: dict[str, Any]) -> str:
    """`<stage>-v<version>-<first 24 hex digits of sha256>` over the inputs' digests and the parameters."""
    named = json_digest({"stage": stage, "version": version, "inputs": inputs, "parameters": parameters})
    return f"{stage}-v{version}-{named[:24]}"
