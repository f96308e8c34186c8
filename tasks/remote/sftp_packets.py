"""Packets of SFTP version 3: how requests are written and answers are read. Pure bytes, no connection.

Names are whatever bytes they are (surrogateescape): one that is not UTF-8 must not break a listing.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from paramiko.sftp import SFTPError

LARGEST_BYTES = 1 << 20
"""No server sends a larger packet; a larger length is text that a profile printed."""

_HAS_SIZE, _HAS_OWNER, _HAS_MODE, _HAS_TIMES, _HAS_MORE = 1, 2, 4, 8, 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Attributes:
    """What SFTP tells about a file."""

    size_bytes: int
    """Exact size."""

    mode: int
    """As st_mode."""

    mtime_s: int
    """Whole seconds."""

    @property
    def is_dir(self) -> bool:
        """A directory itself, no link to one."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_link(self) -> bool:
        """A symbolic link."""
        return stat.S_ISLNK(self.mode)


class StatusError(Exception):
    """The server answered with a status where something else was asked for."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


def packet(kind: int, number: int, body: bytes) -> bytes:
    """A request; `number` comes back with its answer."""
    return struct.pack(">IBI", 5 + len(body), kind, number) + body


def string(content: bytes) -> bytes:
    """A length and so many bytes."""
    return struct.pack(">I", len(content)) + content


def path_string(path: PurePosixPath) -> bytes:
    """A path as a string of a packet."""
    return string(str(path).encode("utf-8", "surrogateescape"))


class Reader:
    """Takes fields off the front of a packet's body. Raises SFTPError where it is too short."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def number(self, form: str = ">I") -> int:
        """One integer, four bytes or (">Q") eight."""
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return int(value)

    def string(self) -> bytes:
        """A length and so many bytes."""
        return self._take(self.number())

    def rest(self) -> bytes:
        """What is left."""
        return self._body[self._at :]

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._body):
            raise SFTPError("a packet is too short")
        self._at += size
        return self._body[self._at - size : self._at]


def read_attributes(reader: Reader) -> Attributes:
    """The attributes that come next."""
    flags = reader.number()
    size = reader.number(">Q") if flags & _HAS_SIZE else 0
    if flags & _HAS_OWNER:
        reader.number(">Q")
    mode = reader.number() if flags & _HAS_MODE else 0
    mtime = reader.number(">Q") & 0xFFFFFFFF if flags & _HAS_TIMES else 0  # access time, modification time
    for _ in range(reader.number() if flags & _HAS_MORE else 0):
        reader.string()
        reader.string()
    return Attributes(size_bytes=size, mode=mode, mtime_s=mtime)


def read_names(reader: Reader) -> Iterator[tuple[str, Attributes]]:
    """The entries of an answer to READDIR."""
    for _ in range(reader.number()):
        name = reader.string().decode("utf-8", "surrogateescape")
        reader.string()  # the line that `ls -l` would print
        yield name, read_attributes(reader)


def read_status(reader: Reader) -> StatusError:
    """The status that comes next; servers of version 2 and less send no message."""
    code = reader.number()
    return StatusError(code, reader.string().decode("utf-8", "replace") if reader.rest() else "")
