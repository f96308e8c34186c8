"""Telemetry of a pipeline: how long each stage worked, starved for input and was blocked by a full queue.

The bottleneck is the stage whose workers are busy the largest share of the time: the others wait for it, on one side or
the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BUSY, STARVED, BLOCKED = "busy", "starved", "blocked"


@dataclass(slots=True)
class StageClock:
    """Seconds that the workers of one stage spent, all together."""

    workers: int
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((BUSY, STARVED, BLOCKED), 0.0))
    items: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Count the body's wall time as BUSY, STARVED or BLOCKED."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self.seconds[what] += time.perf_counter() - start
                self.items += what == BUSY

    def reading(self) -> dict[str, float]:
        """A copy of the seconds so far."""
        with self._lock:
            return dict(self.seconds)


class Telemetry:
    """Readings of all stages, taken at intervals."""

    def __init__(self, clocks: Mapping[str, StageClock]) -> None:
        self.clocks = dict(clocks)
        self._last = time.perf_counter(), {name: clock.reading() for name, clock in clocks.items()}
        self._tokens = self._anchors = 0

    def count(self, *, tokens: int, anchors: int) -> None:
        """Add a step's work."""
        self._tokens += tokens
        self._anchors += anchors

    def sample(self, *, queues: Mapping[str, int]) -> dict[str, Any]:
        """What happened since the last sample: a JSON value with tokens/s, queue depths, shares per stage, bottleneck."""
        now, readings = time.perf_counter(), {name: clock.reading() for name, clock in self.clocks.items()}
        start, before = self._last
        elapsed = now - start
        stages = {
            name: {
                what: round((readings[name][what] - before[name][what]) / (elapsed * clock.workers), 4)
                for what in (BUSY, STARVED, BLOCKED)
            }
            for name, clock in self.clocks.items()
        }
        found = {
            "seconds": round(elapsed, 4),
            "tokens_per_s": round(self._tokens / elapsed, 1),
            "anchors_per_s": round(self._anchors / elapsed, 1),
            "queues": dict(queues),
            "stages": stages,
            "bottleneck": max(stages, key=lambda name: stages[name][BUSY]),
        }
        self._last, self._tokens, self._anchors = (now, readings), 0, 0
        return found
