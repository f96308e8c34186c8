"""The lease: a thread that shows a stage's supervisor, again and again, that its runner lives.

A thread of its own, because whoever follows the stage may be held up for minutes by those who listen to its events.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType

from dflash_model.errors import EvalError
from tasks.remote.supervised_run import SupervisedRun

log = logging.getLogger(__name__)

RENEWALS_A_LEASE = 4
JOIN_S = 2.0
"""A renewal that hangs longer, on a dead link, is left to itself: it can do no harm."""


class Lease:
    """Renews the lease of a started run while the body of `with` runs. A link that is down is met by the next renewal."""

    def __init__(self, run: SupervisedRun, *, lease_s: float) -> None:
        self._run, self._interval_s = run, lease_s / RENEWALS_A_LEASE
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
        while not self._over.wait(self._interval_s):
            count += 1
            try:
                self._run.renew_lease(count)
            except EvalError as exc:
                log.debug("the lease was not renewed: %s", exc.problem)
