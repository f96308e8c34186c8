"""The book of `--plan`: looks at everything, does nothing, and writes down what a run would do, where, and what it would move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.parameters import DrafterSource
from flows.pipeline import Outcome
from tasks.call import Made
from tasks.prompts import prompts_key
from tasks.remote.drafters import RemoteDrafter, discover
from tasks.remote.incoming import has_arrived
from tasks.remote.inventory import RELAY
from tasks.remote.selection import Selection
from tasks.remote.selective import plan_size
from tasks.remote.site import Found, Work
from tasks.settings import RunPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One stage of a run that has not started."""

    name: str
    """For people."""

    host: str
    """Where it would run, or where its artifact lies."""

    state: str
    """"there", "would run" or "would move"."""

    move_bytes: int | None
    """Bytes between hosts; None where they cannot be known before an earlier stage has run."""


class _Planned:
    def __init__(self, outcome: Outcome | None) -> None:
        self._outcome = outcome

    def made(self) -> Outcome | None:
        """What is there already, or None."""
        return self._outcome


class PlanBook:
    """Only asks hosts what they hold."""

    def __init__(self, place: RunPlace) -> None:
        self.place = place
        self.rows: list[PlanRow] = []

    def discover(self, source: DrafterSource, host: str) -> RemoteDrafter:
        """Look for a drafter; only reads."""
        return discover(self.place.site().host(host), source.path, name=source.name)

    def prompts(self, path: Path) -> Outcome | None:
        """The prompts' artifact where this file was used before."""
        found = self.place.site().find(prompts_key(path), prefer=RELAY)
        return _made(found) if found else None

    def relay(self, drafter: RemoteDrafter, selection: Selection, host: str, *, needed_for: str | None) -> _Planned:
        """Say whether the drafter's tensors would have to move, and how many bytes of them; reads the checkpoint's index."""
        site = self.place.site()
        if drafter.host == host:
            return _Planned(None)
        extracted = needed_for is not None and site.find(needed_for) is not None
        there = extracted or has_arrived(drafter, selection, site.host(host))
        state, size = ("there", 0) if there else ("would move", plan_size(drafter, selection, site.host(drafter.host)))
        self.rows.append(PlanRow(name=f"relay {drafter.name}", host=f"{drafter.host} -> {host}", state=state, move_bytes=size))
        return _Planned(None)

    def stage(
        self,
        name: str,
        *,
        hosts: Sequence[str],
        label: str,
        inputs: Mapping[str, Outcome | None],
        parameters: dict[str, Any] | None,
        local: dict[str, Any] | None = None,
    ) -> _Planned:
        """Say whether the stage's artifact is there, and what its inputs would have to move."""
        host = hosts[0]
        if parameters is None or any(outcome is None for outcome in inputs.values()):
            self.rows.append(PlanRow(name=label, host=host, state="would run", move_bytes=None))
            return _Planned(None)
        refs = {role: (outcome.key, outcome.digest) for role, outcome in inputs.items() if outcome is not None}
        found = self.place.site().find(Work(stage=name, inputs=refs, parameters=parameters).key, prefer=host)
        if found is not None:
            self.rows.append(PlanRow(name=label, host=found.host, state="there", move_bytes=0))
            return _Planned(_made(found))
        moved = sum(self._missing_bytes(key, host) for key, _ in refs.values())
        self.rows.append(PlanRow(name=label, host=host, state="would run", move_bytes=moved))
        return _Planned(None)

    def _missing_bytes(self, key: str, host: str) -> int:
        """Bytes that bringing `key` with its parts to `host` would move."""
        site = self.place.site()
        if site.host(host).find_artifact(key) is not None:
            return 0
        found = site.find(key)
        if found is None:
            return 0
        return found.manifest.size_bytes + sum(self._missing_bytes(part, host) for part in found.manifest.parts)


def _made(found: Found) -> Made:
    return Made(key=found.manifest.key, digest=found.manifest.digest, manifest=found.manifest)
