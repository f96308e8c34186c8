"""A file in the making on a host, filled in order through any number of broken links.

What was handed over last is remembered, more than can be under way: after a break the host is asked how much arrived, and
the rest goes again from memory before new bytes follow.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath

from dflash_model.errors import EvalError, HostError, HostFull
from tasks.remote.host import Host
from tasks.remote.patience import Patience, pause

log = logging.getLogger(__name__)

RECENT_BYTES = 16 << 20
"""sshd's window is 2 MiB; the rest is what kernels and pipes may hold."""

FRUITLESS_TRIES = 5
PAUSE_S = 0.5


class Part:
    """One such file."""

    def __init__(self, host: Host, path: PurePosixPath, *, check: Callable[[], None]) -> None:
        """`check` is called again and again and may raise, to end the filling."""
        self._host = host
        self.path = path
        self.check = check

    def size(self) -> int:
        """Bytes that are there; 0 where there is no file. Raises EvalError."""
        facts = self._host.stat(self.path)
        return 0 if facts is None else facts.size_bytes

    def fill(self, blocks: Iterable[bytes], *, at: int) -> bool:
        """Write `blocks` from offset `at` on, what lies behind it is cut off. True once all has arrived and is synced.

        False where the host has lost more than is remembered: the caller must start at an earlier point. Raises EvalError: what
        `blocks` raises, StorageError of the disk, HostError where the host stays away or takes nothing.
        """
        feed = _Feed(blocks, at=at, check=self.check)
        begin, fruitless = at, 0
        while True:
            try:
                self._host.write_blocks(self.path, feed.after(begin), offset=begin, keep=True)
                return True
            except HostFull:
                raise
            except HostError as exc:
                if feed.failed:
                    raise
                arrived = min(self._arrived(), feed.position)
                fruitless = 0 if arrived > begin else fruitless + 1
                if fruitless == FRUITLESS_TRIES:
                    raise
                log.warning("%s goes on at byte %d after a break: %s", self.path, arrived, exc.problem)
                pause(PAUSE_S * fruitless, self.check)
            if arrived < feed.oldest:
                return False
            begin = arrived

    def _arrived(self) -> int:
        what = f"[{self._host.name}] writing {self.path}"
        return Patience(what, grace_s=self._host.grace_s, first_pause_s=PAUSE_S, check=self.check).call(self.size)


class _Feed:
    """Blocks that can be had again from a little way back."""

    def __init__(self, blocks: Iterable[bytes], *, at: int, check: Callable[[], None]) -> None:
        self._blocks = iter(blocks)
        self._check = check
        self._recent: deque[bytes] = deque()
        self.oldest = self.position = at
        self.failed = False
        """True once `blocks` itself raised: no fault of whoever takes them."""

    def after(self, offset: int) -> Iterator[bytes]:
        """What is remembered from `offset` on, then new blocks. `offset` must lie between `oldest` and `position`."""
        skip = offset - self.oldest
        for block in list(self._recent):
            if skip < len(block):
                yield block[max(skip, 0) :]
            skip -= len(block)
        while (fresh := self._next()) is not None:
            yield fresh

    def _next(self) -> bytes | None:
        try:
            self._check()
            block = next(self._blocks, None)
        except EvalError:
            self.failed = True
            raise
        if block is not None:
            self._recent.append(block)
            self.position += len(block)
            while self.position - self.oldest - len(self._recent[0]) >= RECENT_BYTES:
                self.oldest += len(self._recent.popleft())
        return block
