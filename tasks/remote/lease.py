"""The lease: a thread that shows a host, again and again, that whoever holds something there lives.

A thread of its own, because whoever follows a stage may be held up for minutes by those who listen to its events.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from dflash_model.errors import EvalError

log = logging.getLogger(__name__)

JOIN_S = 2.0
"""A renewal that hangs longer, on a dead link, is left to itself: it can do no harm."""


class Lease:
    """Calls `renew` with 1, 2, 3 and so on while the body of `with` runs. A link that is down is met by the next renewal."""

    def __init__(self, renew: Callable[[int], None], *, every_s: float) -> None:
        """Of what `renew` raises, EvalError is met: the next renewal may work."""
        self._renew_once, self._every_s = renew, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(timeout=JOIN_S)

    def _renew(self) -> None:
        count = 0
        while not self._over.wait(self._every_s):
            count += 1
            try:
                self._renew_once(count)
            except EvalError as exc:
                log.debug("the lease was not renewed: %s", exc.problem)
