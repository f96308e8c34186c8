"""How a serving engine is reached: its address as seen from the host that runs the stage, patience, and where its key is.

The key itself is read when the first request is made and lives in memory only: it is in no parameter, request file, log,
artifact or message. It comes from an environment variable of that host or from a file that nobody else may read.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dflash_model.errors import InputError, from_os_error

KEY_VARIABLE = "DFLASH_EVAL_ENGINE_KEY"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAccess:
    """One engine and how patiently it is asked."""

    url: str
    """http:// or https://, host and port; a path only where a proxy puts one before the engine's own."""

    model: str | None = None
    """The model's name there; None: the only one that it serves."""

    concurrency: int = 4
    """Requests at a time."""

    timeout_s: float = 600.0
    """Longest silence of one request: engines answer nothing before the whole completion is there."""

    retries: int = 6
    """Further tries where it is busy (429, 503) or the connection fails, with growing pauses."""

    api_key_env: str = KEY_VARIABLE
    """Environment variable that holds the key, if there is one."""

    api_key_file: str | None = None
    """File that holds the key, readable by its owner alone; wins over the variable."""

    def __post_init__(self) -> None:
        """Raises InputError for an address that is none."""
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 80) > 0
        except ValueError:
            usable = False
        if not usable:
            raise InputError(f"{_without_login(self.url)!r} is no address of a server.", "Give it like http://127.0.0.1:30000.")
        if parts.username is not None or parts.password is not None or parts.query:
            raise InputError(
                "The engine's address holds a login or a query, which would end up in logs.",
                f"Give the key in ${self.api_key_env} or in a file (`api_key_file`).",
            )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ServerAccess:
        """Read the `server` entry of a request's local facts; unknown fields are ignored. Raises InputError."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known and value is not None})

    def read_key(self) -> str | None:
        """The key, or None where there is none. Raises InputError for a file that is missing, empty or open to others."""
        if self.api_key_file is None:
            return os.environ.get(self.api_key_env, "").strip() or None
        path = Path(self.api_key_file).expanduser()
        try:
            mode = path.stat().st_mode
            key = path.read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise from_os_error(exc, f"reading the engine's key file {path}") from exc
        except UnicodeDecodeError:
            key = ""
        if stat.S_IMODE(mode) & 0o077:
            raise InputError(f"{path} holds a key and can be read by others (mode {stat.S_IMODE(mode):o}).", f"chmod 600 {path}")
        if not key or not key.isascii() or not key.isprintable():
            raise InputError(f"{path} does not hold a key: one line of plain characters is expected.", "Write the key into it.")
        return key


def _without_login(url: str) -> str:
    """The address without what stands before an @: it may be a password."""
    scheme, _, rest = url.rpartition("//")
    return f"{scheme}//{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]
