"""Trying again while a link is down: with backoff, for a limited time, and open to other reasons to stop."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from dflash_model.errors import HostError

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 10.0
STEP_S = 0.1
T = TypeVar("T")


class Patience:
    """Repeats calls that fail with HostError until one works, or `grace_s` have passed since the first failure in a row."""

    def __init__(self, what: str, *, grace_s: float, first_pause_s: float, check: Callable[[], None]) -> None:
        self._what, self._grace_s, self._first_pause_s, self._check = what, grace_s, first_pause_s, check
        self.exhausted = False
        """True once it gave up: the host is not worth another call now."""

    def call(self, action: Callable[[], T]) -> T:
        """What `action` returns, as soon as it does. Raises HostError past the grace, and whatever `check` raises meanwhile."""
        failed_at: float | None = None
        pause_s = self._first_pause_s
        while True:
            try:
                answer = action()
            except HostError as exc:
                if failed_at is None:
                    failed_at = time.monotonic()
                    log.warning("%s: %s Trying again for %g s.", self._what, exc.problem, self._grace_s)
                if time.monotonic() - failed_at >= self._grace_s:
                    self.exhausted = True
                    raise HostError(
                        f"{self._what}: the host could not be reached for {self._grace_s:g} s: {exc.problem}", exc.fix
                    ) from exc
            else:
                if failed_at is not None:
                    log.info("%s: the host answers again after %.1f s", self._what, time.monotonic() - failed_at)
                return answer
            pause(min(pause_s * random.uniform(0.5, 1.0), self._grace_s), self._check)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def pause(seconds: float, check: Callable[[], None]) -> None:
    """Sleep, but call `check`, which may raise, again and again."""
    until = time.monotonic() + seconds
    while True:
        check()
        rest = until - time.monotonic()
        if rest <= 0:
            return
        time.sleep(min(STEP_S, rest))
