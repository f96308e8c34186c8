"""A limit on bytes a second, shared by everything that moves bytes to or from one host."""

from __future__ import annotations

import threading
import time

BURST_S = 0.25
"""So many seconds' worth may pass at once after a pause."""


class Throttle:
    """A token bucket. Whoever moves bytes says so afterwards and is held up for as long as they were too many."""

    def __init__(self, bytes_per_s: float | None) -> None:
        """`bytes_per_s` None: no limit."""
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._paid_until = 0.0

    @property
    def step_bytes(self) -> int:
        """How much to move before saying so: a second's worth at most, so that the limit holds within seconds."""
        return 1 << 20 if self._rate is None else max(1 << 14, min(1 << 20, int(self._rate)))

    def moved(self, size: int) -> None:
        """`size` more bytes have moved; returns when the next ones may."""
        if self._rate is None or not size:
            return
        with self._lock:
            now = time.monotonic()
            self._paid_until = max(self._paid_until, now - BURST_S) + size / self._rate
            wait_s = self._paid_until - now
        if wait_s > 0:
            time.sleep(wait_s)
