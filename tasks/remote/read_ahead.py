"""Reads that are known beforehand, asked for before they are wanted: a long round trip is paid once, not once a block.

The foreseen reads come in order, perhaps of several files of one SFTP session. A read that was not foreseen ends the
foresight: what is under way is waited for and thrown away, then the session answers single questions again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.remote.sftp import IN_FLIGHT, REQUEST_BYTES, Sftp


@dataclass(slots=True)
class _Range:
    """What is foreseen and not taken yet: from `offset` to `end` behind `handle`."""

    handle: bytes
    offset: int
    end: int


@dataclass(slots=True)
class _Request:
    """One READ, and what has come of it."""

    handle: bytes
    offset: int
    size: int
    data: memoryview | None = None


class ReadAhead:
    """The reads that one session expects; for one thread at a time."""

    def __init__(self, sftp: Sftp) -> None:
        self._sftp = sftp
        self._doing = ""
        self._ranges: deque[_Range] = deque()
        self._unasked: deque[_Range] = deque()
        self._asked: deque[_Request] = deque()
        self._flying: dict[int, _Request] = {}
        self._rest = memoryview(b"")

    def expect(self, ranges: Sequence[tuple[bytes, int, int]], *, doing: str) -> None:
        """From now on each (handle, offset, size) will be read, in this order and in any number of steps. Raises EvalError."""
        self.forget()
        self._doing = doing
        self._ranges.extend(_Range(handle, offset, offset + size) for handle, offset, size in ranges if size)
        self._unasked.extend(_Range(one.handle, one.offset, one.end) for one in self._ranges)

    def take(self, handle: bytes, offset: int, size: int) -> list[memoryview] | None:
        """Those bytes if they come next, fewer where the file ends; None where others were foreseen. Raises EvalError."""
        first = self._ranges[0] if self._ranges else None
        if first is None or (first.handle, first.offset) != (handle, offset) or offset + size > first.end:
            return None
        found: list[memoryview] = []
        while size:
            block = self._rest or self._next_block()
            if not block:  # the file has ended, so nothing that was foreseen holds
                self.forget()
                return found
            found.append(block[:size])
            self._rest = block[size:]
            size -= len(found[-1])
            first.offset += len(found[-1])
        if first.offset == first.end:
            self._ranges.popleft()
        return found

    def forget(self) -> None:
        """Expect nothing any more; answers that are under way are waited for. Raises EvalError."""
        self._flying.clear()
        while self._sftp.is_owed:
            self._sftp.next_data(doing=self._doing)
        self._ranges.clear()
        self._unasked.clear()
        self._asked.clear()
        self._rest = memoryview(b"")

    def _next_block(self) -> memoryview:
        """The answer to the oldest request; b"" at the end of its file."""
        self._ask()
        request = self._asked.popleft()
        while request.data is None:
            self._receive()
        left = request.size - len(request.data)
        if left and request.data:  # a server that answers less than it was asked for
            again = _Request(request.handle, request.offset + len(request.data), left)
            self._asked.appendleft(again)
            self._send([again])
        return request.data

    def _ask(self) -> None:
        """Keep as many requests under way as are allowed, arrived ones included: they wait in memory."""
        fresh: list[_Request] = []
        while self._unasked and len(self._asked) + len(fresh) < IN_FLIGHT:
            one = self._unasked[0]
            size = min(REQUEST_BYTES, one.end - one.offset)
            fresh.append(_Request(one.handle, one.offset, size))
            one.offset += size
            if one.offset == one.end:
                self._unasked.popleft()
        self._asked.extend(fresh)
        self._send(fresh)

    def _send(self, requests: Sequence[_Request]) -> None:
        numbers = self._sftp.ask_for([(one.handle, one.offset, one.size) for one in requests], doing=self._doing)
        self._flying.update(zip(numbers, requests, strict=True))

    def _receive(self) -> None:
        number, data = self._sftp.next_data(doing=self._doing)
        self._flying.pop(number).data = data
