"""What a run tells whoever watches it: plain events, handed to listeners in the same process. Nobody has to listen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One thing that happened to one stage."""

    what: str
    """"started", "progress", "note", "ran", "cached" or "failed"."""

    stage: str
    """What the stage is called for people, e.g. "replay step-00110 1/2"."""

    host: str
    """Where it runs or lies."""

    done: int = 0
    """With "progress": how much of `total` is done."""

    total: int = 0
    """With "progress": how much there is to do."""

    unit: str = ""
    """With "progress": what is counted ("bytes", "prompts", "anchors")."""

    per_second: float = 0.0
    """With "progress": the pace of late, 0 where it is not known."""

    seconds: float = 0.0
    """With "ran" and "cached": wall time."""

    message: str = ""
    """With "note": a sentence."""


Listener = Callable[[Event], None]
_listeners: list[Listener] = []
_lock = threading.Lock()


def tell(event: Event) -> None:
    """Hand `event` to every listener, one at a time."""
    with _lock:
        for listener in _listeners:
            listener(event)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` with every event while the body runs."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def moved_text(moved: int, source: int) -> str:
    """ "moved 5.1 of 17.2 GB"."""
    unit, name = (1e9, "GB") if source >= 1e9 else (1e6, "MB")
    return f"moved {moved / unit:.1f} of {source / unit:.1f} {name}"


def moving_text(done: int, total: int, bytes_per_s: float | None) -> str:
    """ "1.2 of 3.0 GB, 41.0 MB/s, about 44 s left"."""
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    pace = f", {bytes_per_s / 1e6:.1f} MB/s, about {(total - done) / bytes_per_s:.0f} s left" if bytes_per_s else ""
    return f"{done / unit:.1f} of {total / unit:.1f} {name}{pace}"
