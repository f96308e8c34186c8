"""Doing something on the first host that can: the next one where a host is down, and a wait where others have all GPUs.

"Host down" moves on; a stage's own error never does. Only HostTaken is worth waiting for, and only once nobody else can.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from dflash_model.errors import ArtifactLost, HostBusy, HostError, HostTaken
from tasks.remote import failures
from tasks.remote.patience import pause
from tasks.remote.placement import Avoided, blamed_host
from tasks.remote.processes import ending

log = logging.getLogger(__name__)

ASK_EVERY_S = 10.0
"""While waiting for a GPU; a place in the queue is kept for several times as long."""

T = TypeVar("T")
OnSkip = Callable[[str, str], None]
"""(host, why it is passed over or waited for)"""


class Choice:
    """The candidates for one piece of work, best first."""

    def __init__(
        self,
        stage: str,
        hosts: Sequence[str],
        *,
        avoided: Avoided,
        on_skip: OnSkip,
        on_wait: OnSkip,
        leave: Callable[[str, str], None],
    ) -> None:
        """`leave(host, ticket)` gives up a place in that host's queue."""
        self._stage, self._hosts, self._avoided, self._leave = stage, tuple(hosts), avoided, leave
        self._on_skip, self._on_wait = on_skip, on_wait
        self._reasons: dict[str, HostError] = {}

    def first_that_can(self, make: Callable[[str, str | None], T], *, wait_s: float) -> T:
        """What `make(host, ticket)` returns on the first host that does not raise HostError. All are asked once without a
        ticket; then those whose GPUs are taken are waited for, up to `wait_s`, with a ticket that keeps our place.

        Raises HostError with every reason, ArtifactLost where an input cannot be fetched, Cancelled.
        """
        until = time.monotonic() + wait_s
        found = self._ask(self._hosts, make, None)
        if found is not None:
            return found[0]
        ticket, joined = uuid.uuid4().hex, set[str]()
        try:
            while (taken := self._taken()) and time.monotonic() < until:
                if not joined:
                    self._say_wait(taken, wait_s)
                joined |= set(taken)
                found = self._ask(taken, make, ticket)
                if found is not None:
                    return found[0]
                pause(min(ASK_EVERY_S, max(0.0, until - time.monotonic())), self._check)
        finally:
            for name in joined:
                self._leave(name, ticket)
        raise self._error(waited_s=wait_s if joined else 0.0)

    def _ask(self, names: Sequence[str], make: Callable[[str, str | None], T], ticket: str | None) -> tuple[T] | None:
        """One round; (what was made,), None where no host could."""
        for name in names:
            avoided = self._avoided.reason(name)
            try:
                if avoided is not None:
                    raise HostError(avoided)
                return (make(name, ticket),)
            except HostBusy as exc:
                # The host is well: it keeps being asked for what it holds, and for a GPU the next time.
                self._pass_over(name, exc)
            except HostError as exc:
                if avoided is None:
                    self._blame(name, exc)
                self._pass_over(name, exc)
        return None

    def _blame(self, name: str, error: HostError) -> None:
        blamed = blamed_host(error) or name
        self._avoided.note(blamed, error.problem)
        if blamed != name:
            raise ArtifactLost(
                f"An input of {self._stage} cannot be fetched: {error.problem}", "Run again; it will be made anew."
            ) from error

    def _pass_over(self, name: str, error: HostError) -> None:
        """Said once: while waiting, only what is new."""
        if not (isinstance(error, HostTaken) and isinstance(self._reasons.get(name), HostTaken)):
            self._on_skip(name, error.problem)
        self._reasons[name] = error

    def _taken(self) -> tuple[str, ...]:
        return tuple(name for name in self._hosts if isinstance(self._reasons[name], HostTaken))

    def _say_wait(self, taken: Sequence[str], wait_s: float) -> None:
        for name in taken:
            self._on_wait(name, f"{self._reasons[name].problem} Waiting up to {wait_s / 60:.3g} min.")

    def _check(self) -> None:
        if ending():
            raise failures.not_started(f"stage {self._stage}")

    def _error(self, *, waited_s: float) -> HostError:
        reasons = list(self._reasons.values())
        waited = f" {waited_s / 60:.3g} min were waited." if waited_s else ""
        if len(reasons) == 1:
            return type(reasons[0])(f"{reasons[0].problem}{waited}", reasons[0].fix)
        return HostError(
            f"No host can run {self._stage}: {' '.join(reason.problem for reason in reasons)}{waited}",
            "Mend one of them, or name another with --place.",
        )
