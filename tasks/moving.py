"""What a transfer tells whoever watches: bytes, MB a second and time left, on the terminal and as a Prefect progress artifact."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from tasks.events import Event, moved_text, moving_text, tell
from tasks.progress import ProgressArtifact, run_logger

TELL_EVERY_S = 0.2
RATE_OVER_S = 10.0
log = logging.getLogger(__name__)


class Meter:
    """Gets (bytes done, bytes in all) as often as they change."""

    def __init__(self, label: str, host: str, *, source_bytes: int) -> None:
        """`source_bytes`: size of the whole checkpoint, of which a part is moved."""
        self._label, self._host, self._source_bytes = label, host, source_bytes
        self._told = 0.0
        self._seen: deque[tuple[float, int]] = deque()
        self._artifact = ProgressArtifact(f"{label} on {host}")

    def __call__(self, done: int, total: int) -> None:
        """So many bytes are there now."""
        now = time.monotonic()
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # it starts again from an earlier point
        self._seen.append((now, done))
        while now - self._seen[0][0] > RATE_OVER_S:
            self._seen.popleft()
        if now - self._told < TELL_EVERY_S and done < total:
            return
        self._told = now
        rate = self.bytes_per_s
        tell(
            Event(
                what="progress", stage=self._label, host=self._host, done=done, total=total, unit="bytes", per_second=rate or 0.0
            )
        )
        self._artifact.show(100.0 * done / max(total, 1), moving_text(done, total, rate))

    @property
    def bytes_per_s(self) -> float | None:
        """Over the last ten seconds; None before there is anything to measure. What an earlier run moved does not count."""
        if len(self._seen) < 2:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return (last - first) / (now - began) if now > began else None

    def finished(self, transfer: dict[str, Any]) -> dict[str, Any]:
        """Say what moved; the fields of a run's row about it."""
        note = moved_text(transfer["bytes_written"], self._source_bytes)
        resumed = f", {transfer['bytes_resumed'] / 1e6:.1f} MB had arrived before" if transfer["bytes_resumed"] else ""
        how = "checked by CRC32" if transfer["checked"] == "crc32" else f"checked at the source: {transfer['checked']}"
        message = f"{note} in {transfer['seconds']:.1f} s{resumed}, {how}"
        run_logger(log).info("[%s] %s: %s", self._host, self._label, message)
        tell(Event(what="note", stage=self._label, host=self._host, message=message))
        return {
            "moved_bytes": transfer["bytes_written"],
            "read_bytes": transfer["bytes_read"],
            "source_bytes": self._source_bytes,
        }
