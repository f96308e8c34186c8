"""The book of a real run: every stage becomes a Prefect task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.parameters import DrafterSource
from flows.pipeline import Outcome
from tasks.call import Account, Made, Pending
from tasks.checkpoints import discover_drafter, relay_drafter
from tasks.events import Event, tell
from tasks.prompts import import_prompts
from tasks.remote.drafters import RemoteDrafter
from tasks.remote.incoming import has_arrived
from tasks.remote.selection import Selection
from tasks.remote.site import Work


class _MadeLater:
    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._made: Made | None = None

    def made(self) -> Made | None:
        """Wait for the task; the artifact it made."""
        self._made = self._made or self._pending.result()
        return self._made


class _Moved:
    def __init__(self, pending: Pending | None) -> None:
        self._pending = pending

    def made(self) -> None:
        """Wait for the move; it makes no artifact."""
        if self._pending is not None:
            self._pending.value()


class FlowBook:
    """Calls tasks and keeps the account of what ran."""

    def __init__(self, account: Account, *, redo: Collection[str] = ()) -> None:
        """`account` has what was done so far, in earlier attempts too."""
        self.place = account.place
        self.account = account
        self.found: list[RemoteDrafter] = []
        self._redo = set(redo)

    def discover(self, source: DrafterSource, host: str) -> RemoteDrafter:
        """Look for a drafter; only reads."""
        label = source.name or source.path.rpartition("/")[2]
        found = RemoteDrafter.from_json(discover_drafter(host, source.path, source.name, label, self.place.to_json()))
        self.found.append(found)
        step = f", step {found.step}" if found.step is not None else ""
        tell(Event(what="note", stage=label, host=host, message=f"found {found.path}{step}, {found.size_bytes / 1e6:.1f} MB"))
        return found

    def prompts(self, path: Path) -> Made:
        """Take a prompt file into the relay's store."""
        manifest = import_prompts(self.place.site(), path)
        return Made(key=manifest.key, digest=manifest.digest, manifest=manifest)

    def relay(self, drafter: RemoteDrafter, selection: Selection, host: str, *, needed_for: str | None) -> _Moved:
        """Bring a drafter's tensors to `host`, unless the artifact `needed_for` exists already or it lies there anyway."""
        if drafter.host == host:
            return _Moved(None)
        site = self.place.site()
        extracted = needed_for is not None and site.find(needed_for) is not None
        present = extracted or has_arrived(drafter, selection, site.host(host))
        arguments = {
            "drafter": drafter.to_json(),
            "selection": selection.to_json(),
            "host": host,
            "label": f"relay {drafter.name}",
            "place": self.place.to_json(),
            "needed": not extracted,
        }
        key = f"relay-v2-{selection.name_for(drafter.digest)}-{host}"
        return _Moved(self.account.call(relay_drafter, arguments, key=key, present=present, host=host))

    def stage(
        self,
        name: str,
        *,
        hosts: Sequence[str],
        label: str,
        inputs: Mapping[str, Outcome | None],
        parameters: dict[str, Any] | None,
        local: dict[str, Any] | None = None,
    ) -> _MadeLater:
        """Find or make a stage's artifact."""
        assert parameters is not None
        refs = {role: (outcome.key, outcome.digest) for role, outcome in inputs.items() if outcome is not None}
        assert len(refs) == len(inputs)
        fresh = {"fresh": True} if name in self._redo else {}
        work = Work(stage=name, inputs=refs, parameters=parameters, local=(local or {}) | fresh)
        return _MadeLater(self.account.stage(work, hosts=hosts, label=label, redo=name in self._redo))
