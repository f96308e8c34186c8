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
