"""The ledger: for each artifact its manifest and the hosts seen to hold it. Small JSON files below the relay's home.

The ledger is a hint, not the truth: whoever relies on a holder asks that host. Losing it costs look-ups, no work.
"""

from __future__ import annotations

import threading
from pathlib import Path

from dflash_model.artifacts import Manifest
from dflash_model.errors import StorageError
from dflash_model.storage import read_json, write_json


class Ledger:
    """One file a key: {"digest", "kind", "size_bytes", "parts", "holders": [host, ...]}."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    def holders(self, key: str) -> tuple[str, ...]:
        """Hosts seen to hold `key`, first seen first."""
        path = self._path(key)
        if not path.exists():
            return ()
        try:
            return tuple(read_json(path)["holders"])
        except (StorageError, KeyError, TypeError):
            return ()

    def record(self, manifest: Manifest, host: str) -> None:
        """Note that `host` holds this artifact. Raises EvalError."""
        with self._lock:
            holders = list(self.holders(manifest.key))
            if host in holders:
                return
            entry = {
                "digest": manifest.digest,
                "kind": manifest.kind,
                "size_bytes": manifest.size_bytes,
                "parts": manifest.parts,
                "holders": [*holders, host],
            }
            write_json(self._path(manifest.key), entry)

    def forget(self, key: str, host: str) -> None:
        """Note that `host` does not hold `key` any more. Raises EvalError."""
        with self._lock:
            path = self._path(key)
            holders = [holder for holder in self.holders(key) if holder != host]
            if path.exists() and holders:
                write_json(path, read_json(path) | {"holders": holders})
            else:
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.json"
