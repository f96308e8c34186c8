"""What a stage runner needs of a host that is not this machine: short scripts and small files. Everything may fail with
HostError at any time, and a later call connects anew: whoever needs to survive a cut link calls again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """One finished script."""

    exit_code: int
    """Exit status of `sh`."""

    stdout: bytes
    """What the script wrote, without anything that the login shell printed before it."""

    stderr: bytes
    """Likewise."""


class Shell(Protocol):
    """Scripts and small files on one host."""

    @property
    def name(self) -> str:
        """The host's name, for messages."""
        ...

    def run(self, script: str, *, timeout_s: float, stdin: bytes = b"") -> Completed:
        """Run a POSIX sh script (never a user's text: quote every path). Raises HostError: unreachable, cut, or past `timeout_s`."""
        ...

    def read_from(self, path: PurePosixPath, offset: int, *, limit: int = 1 << 20) -> bytes:
        """Up to `limit` bytes of a file from `offset`; b"" at its end or where there is no file. Raises HostError."""
        ...

    def write_small(self, path: PurePosixPath, content: bytes) -> None:
        """Write a small file whole (part, then rename), parents made. Raises HostError or StorageError."""
        ...
