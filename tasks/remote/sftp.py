"""The reading half of SFTP: stat, listings, and ranges of files with many requests in flight.

paramiko's own client is not used for this: its read-ahead has no bound, and waits for ever for the rest of a file that was
cut short while it was read.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from paramiko import sftp as protocol

from tasks.remote.remote_script import RemoteScript
from tasks.remote.sftp_packets import (
    LARGEST_BYTES,
    Attributes,
    Reader,
    StatusError,
    packet,
    path_string,
    read_attributes,
    read_names,
    read_status,
    string,
)
from tasks.remote.ssh_errors import sftp_refused, translated

VERSION = 3
REQUEST_BYTES = 255 << 10
"""The most that OpenSSH's server answers at once; others answer less and are asked again."""

_DATA_HEAD = 8
"""Of the body of a DATA packet: the request's number, the number of bytes."""

IN_FLIGHT = 32
"""Read requests that are not answered yet: 8 MiB, one window."""


@dataclass(slots=True)
class _Piece:
    """A part of range `number` that is asked for: `size` bytes from `offset` of the file, which belong at `at` of the answer."""

    number: int
    at: int
    offset: int
    size: int


class Sftp:
    """One session, for one thread at a time."""

    def __init__(self, stream: RemoteScript, *, host: str) -> None:
        """Greet the server at the other end of `stream`. Raises HostError where it is none."""
        self._stream = stream
        self._host = host
        self._buffer = b""
        self._at = 0
        self._last_number = 0
        self._due: set[int] = set()
        self._in_step = False
        with self._asking("starting SFTP"):
            self._stream.write(struct.pack(">IBI", 5, protocol.CMD_INIT, VERSION))
            kind, _ = self._packet()
            if kind != protocol.CMD_VERSION:
                raise protocol.SFTPError(f"packet {kind} instead of a version")
            self._in_step = True

    @property
    def is_usable(self) -> bool:
        """True while the stream is open and no answer is outstanding."""
        return self._in_step and self._stream.is_open

    @property
    def is_open(self) -> bool:
        """True while the stream is open."""
        return self._stream.is_open

    @property
    def is_owed(self) -> bool:
        """True while answers to `ask_for` are due."""
        return bool(self._due)

    def stat(self, path: PurePosixPath) -> Attributes | None:
        """Attributes, symbolic links followed; None where nothing is. Raises EvalError."""
        with self._asking(f"looking at {path}"):
            try:
                return read_attributes(self._ask(protocol.CMD_STAT, path_string(path), answer=protocol.CMD_ATTRS))
            except StatusError as exc:
                if exc.code == protocol.SFTP_NO_SUCH_FILE:
                    return None
                raise

    def listing(self, path: PurePosixPath) -> list[tuple[str, Attributes]]:
        """(name, attributes of the entry itself); [] where there is no directory or it may not be read. Raises EvalError."""
        with self._asking(f"listing {path}"):
            try:
                handle = self._ask(protocol.CMD_OPENDIR, path_string(path), answer=protocol.CMD_HANDLE).string()
            except StatusError as exc:
                if exc.code in (protocol.SFTP_NO_SUCH_FILE, protocol.SFTP_PERMISSION_DENIED):
                    return []
                raise
            entries: list[tuple[str, Attributes]] = []
            try:
                while True:
                    entries += read_names(self._ask(protocol.CMD_READDIR, string(handle), answer=protocol.CMD_NAME))
            except StatusError as exc:
                if exc.code != protocol.SFTP_EOF:
                    raise
            self._close(handle)
            return [(name, attributes) for name, attributes in entries if name not in (".", "..")]

    def open(self, path: PurePosixPath) -> bytes:
        """A handle for reading; it stays with its file whatever becomes of the name. Raises EvalError."""
        with self._asking(f"opening {path}"):
            body = path_string(path) + struct.pack(">II", protocol.SFTP_FLAG_READ, 0)
            return self._ask(protocol.CMD_OPEN, body, answer=protocol.CMD_HANDLE).string()

    def fstat(self, handle: bytes, *, doing: str) -> Attributes:
        """Attributes of an open file. Raises EvalError."""
        with self._asking(doing):
            return read_attributes(self._ask(protocol.CMD_FSTAT, string(handle), answer=protocol.CMD_ATTRS))

    def close(self, handle: bytes, *, doing: str) -> None:
        """Close a handle. Raises EvalError."""
        with self._asking(doing):
            self._close(handle)

    def read(self, handle: bytes, ranges: Sequence[tuple[int, int]], *, doing: str) -> list[bytes]:
        """The bytes of every (offset, size), in order; shorter ones where the file ends. Raises EvalError."""
        answers = [bytearray(size) for _, size in ranges]
        ends = [size for _, size in ranges]
        waiting = deque(_pieces(ranges))
        flying: dict[int, _Piece] = {}
        with self._asking(doing):
            while waiting or flying:
                self._in_step = False
                self._stream.write(b"".join(self._read_requests(handle, waiting, flying)))
                number, kind, reader = self._answer()
                piece = flying.pop(number, None)
                if piece is None:
                    raise protocol.SFTPError("an answer that nobody asked for")
                data = _data(kind, reader)
                answers[piece.number][piece.at : piece.at + len(data)] = data
                left = piece.size - len(data)
                if not data:
                    ends[piece.number] = min(ends[piece.number], piece.at)
                elif left > 0:
                    waiting.appendleft(_Piece(piece.number, piece.at + len(data), piece.offset + len(data), left))
                self._in_step = not flying
        return [bytes(answer[:end]) for answer, end in zip(answers, ends, strict=True)]

    def ask_for(self, reads: Iterable[tuple[bytes, int, int]], *, doing: str) -> list[int]:
        """Send READ requests for (handle, offset, size) without waiting; their numbers, for `next_data`. Raises HostError.

        Until all are answered, nothing else may be asked of this session.
        """
        numbers, packets = [], []
        for handle, offset, size in reads:
            numbers.append(self._next_number())
            packets.append(packet(protocol.CMD_READ, numbers[-1], string(handle) + struct.pack(">QI", offset, size)))
        if packets:
            self._due.update(numbers)
            self._in_step = False
            with self._asking(doing):
                self._stream.write(b"".join(packets))
        return numbers

    def next_data(self, *, doing: str) -> tuple[int, memoryview]:
        """(number, bytes) of whichever answer to `ask_for` comes next; b"" at the end of its file. Raises EvalError."""
        with self._asking(doing):
            kind, body = self._packet()
            number = int.from_bytes(body[:4])
            if number not in self._due:
                raise protocol.SFTPError("an answer that nobody asked for")
            self._due.remove(number)
            self._in_step = not self._due
            if kind == protocol.CMD_DATA and int.from_bytes(body[4:_DATA_HEAD]) == len(body) - _DATA_HEAD:
                return number, memoryview(body)[_DATA_HEAD:]  # without the copies that a Reader makes
            reader = Reader(body)
            reader.number()
            return number, memoryview(_data(kind, reader))

    def _read_requests(self, handle: bytes, waiting: deque[_Piece], flying: dict[int, _Piece]) -> Iterator[bytes]:
        while waiting and len(flying) < IN_FLIGHT:
            piece = waiting.popleft()
            flying[self._next_number()] = piece
            yield packet(protocol.CMD_READ, self._last_number, string(handle) + struct.pack(">QI", piece.offset, piece.size))

    def _close(self, handle: bytes) -> None:
        try:
            self._ask(protocol.CMD_CLOSE, string(handle), answer=protocol.CMD_STATUS)
        except StatusError as exc:
            if exc.code != protocol.SFTP_OK:
                raise

    def _ask(self, kind: int, body: bytes, *, answer: int) -> Reader:
        """One request and its answer. Raises StatusError for a status, SFTPError, HostError."""
        number = self._next_number()
        self._in_step = False
        self._stream.write(packet(kind, number, body))
        answered, got, reader = self._answer()
        if answered != number or got not in (answer, protocol.CMD_STATUS):
            raise protocol.SFTPError(f"packet {got} where {answer} was due")
        self._in_step = True
        if got == protocol.CMD_STATUS:
            raise read_status(reader)
        return reader

    def _next_number(self) -> int:
        self._last_number = (self._last_number + 1) & 0xFFFFFFFF
        return self._last_number

    def _answer(self) -> tuple[int, int, Reader]:
        """(number of the request, kind, the rest) of the next packet."""
        kind, body = self._packet()
        reader = Reader(body)
        return reader.number(), kind, reader

    def _packet(self) -> tuple[int, bytes]:
        size = int.from_bytes(self._take(4))
        if not 1 <= size <= LARGEST_BYTES:
            raise protocol.SFTPError("text instead of packets")
        return self._take(1)[0], self._take(size - 1)

    def _take(self, size: int) -> bytes:
        have = len(self._buffer) - self._at
        if have < size:
            parts = [self._buffer[self._at :]]
            while have < size:  # joined once: a packet comes in many blocks
                block = self._stream.read()
                if not block:
                    raise EOFError
                parts.append(block)
                have += len(block)
            self._buffer, self._at = b"".join(parts), 0
        self._at += size
        return self._buffer[self._at - size : self._at]

    @contextmanager
    def _asking(self, doing: str) -> Iterator[None]:
        """A body whose statuses and broken packets leave as EvalError."""
        try:
            with translated(self._host, doing):
                yield
        except StatusError as exc:
            raise sftp_refused(self._host, doing, code=exc.code, message=exc.message) from exc


def _data(kind: int, reader: Reader) -> bytes:
    """The bytes of an answer to READ, b"" at the end of the file."""
    if kind == protocol.CMD_DATA:
        return reader.string()
    if kind != protocol.CMD_STATUS:
        raise protocol.SFTPError(f"packet {kind} instead of data")
    status = read_status(reader)
    if status.code == protocol.SFTP_EOF:
        return b""
    raise status


def _pieces(ranges: Sequence[tuple[int, int]]) -> Iterator[_Piece]:
    for number, (offset, size) in enumerate(ranges):
        for at in range(0, size, REQUEST_BYTES):
            yield _Piece(number, at, offset + at, min(REQUEST_BYTES, size - at))
