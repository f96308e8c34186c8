"""Where a stage may run: candidates in order, and which of them are to be left alone for a while, with the reason.

"Host down" moves a stage on to the next candidate; a stage's own error never does, since it would fail there as well.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping, Sequence

from dflash_model.errors import HostError, InputError
from tasks.remote.inventory import RELAY, Inventory

AVOID_S = 120.0
ROLE_OF = {
    "identify-target": "target",
    "target-tables": "target",
    "references": "target",
    "hidden-states": "target",
    "extract-weights": "eval",
    "replay": "eval",
}
"""Stage -> the role that a host needs for it; `compare` runs on the relay."""

NEEDS_GPU = ("references", "hidden-states")
"""Stages that load the target; they take a GPU for themselves where the host names its GPUs."""

_BLAMED = re.compile(r"\[([^\[\]]+)\]")


def candidates(inventory: Inventory, stage: str, placement: Mapping[str, Sequence[str]], *, failover: bool) -> tuple[str, ...]:
    """Hosts that may run `stage`, best first: those that `placement` names, else those with its role in inventory order.

    Without `failover` only the first. Raises InputError for an unknown host or stage in `placement`.
    """
    unknown = sorted(set(placement) - {*ROLE_OF, "compare"})
    if unknown:
        raise InputError(f"`placement` names a stage {unknown[0]!r}.", f"Stages: {', '.join([*ROLE_OF, 'compare'])}.")
    if placement.get(stage):
        names = tuple(inventory.entry(name).name for name in placement[stage])
    elif stage in ROLE_OF:
        names = tuple(entry.name for entry in inventory.with_role(ROLE_OF[stage]))
    else:
        names = (RELAY,)
    return names if failover else names[:1]


def blamed_host(error: HostError) -> str | None:
    """The host that an error speaks of: every message about a host starts with its name in brackets."""
    found = _BLAMED.match(error.problem)
    return found.group(1) if found else None


class Avoided:
    """Hosts that failed a short while ago: not asked again before AVOID_S have passed, so that a dead host costs one time-out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[str, tuple[float, str]] = {}

    def note(self, name: str, reason: str) -> None:
        """Leave `name` alone for a while."""
        with self._lock:
            self._until[name] = (time.monotonic() + AVOID_S, reason)

    def reason(self, name: str) -> str | None:
        """Why `name` is left alone now, or None."""
        with self._lock:
            until, reason = self._until.get(name, (0.0, ""))
            return reason if time.monotonic() < until else None

    def clear(self) -> None:
        """Ask every host again, as a new run does."""
        with self._lock:
            self._until.clear()
