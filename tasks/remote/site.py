"""The site: all hosts, the ledger, and the two questions every task asks. Is it there? If not, make it there.

`Work` names a stage's output before it exists; `Site.ensure` finds it on any host, or brings the inputs and runs it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_model.artifacts import Manifest
from dflash_model.digests import stage_key
from dflash_model.errors import InputError, StorageError
from dflash_model.stages.protocol import Request
from dflash_model.stages.registry import STAGES
from dflash_model.storage import sweep
from tasks.remote.host import Host, OnEvent, literal_pattern
from tasks.remote.inventory import RELAY, HostEntry, Inventory, read_inventory, single_machine
from tasks.remote.ledger import Ledger
from tasks.remote.local import LocalHost
from tasks.remote.transfer import OnBytes, copy_artifact

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One stage to be done. Its key depends on content alone, never on the host."""

    stage: str
    """Name in the registry."""

    inputs: dict[str, tuple[str, str]]
    """Role -> (artifact key, digest)."""

    parameters: dict[str, Any]
    """Part of the key."""

    local: dict[str, Any] = field(default_factory=dict)
    """Facts of the host that runs it; must not change the output."""

    @property
    def key(self) -> str:
        """Name of the artifact that this work makes."""
        digests = {role: digest for role, (_, digest) in self.inputs.items()}
        return stage_key(self.stage, STAGES[self.stage].version, digests, self.parameters)

    def to_json(self) -> dict[str, Any]:
        """A JSON value for task parameters; `from_json` reads it back."""
        return {"stage": self.stage, "inputs": self.inputs, "parameters": self.parameters, "local": self.local}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Work:
        """Read what `to_json` gave."""
        inputs = {role: (key, digest) for role, (key, digest) in data["inputs"].items()}
        return cls(stage=data["stage"], inputs=inputs, parameters=data["parameters"], local=data["local"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """An artifact and one host that holds it completely."""

    manifest: Manifest
    """As that host has it."""

    host: str
    """Name of the holder."""


class Site:
    """Hosts by name, and what lies where."""

    def __init__(self, inventory: Inventory, *, home: Path) -> None:
        self.inventory = inventory
        self.home = home
        self.ledger = Ledger(home / RELAY / "ledger")
        self._hosts = {entry.name: _open(entry) for entry in inventory.hosts}
        self._guard = threading.Lock()
        self._moves: dict[str, threading.Lock] = {}

    def host(self, name: str) -> Host:
        """The host called `name`. Raises InputError."""
        self.inventory.entry(name)
        return self._hosts[name]

    def find(self, key: str, *, prefer: str | None = None) -> Found | None:
        """A host that holds `key` and its parts completely, asked now; None where no reachable host does."""
        known = self.ledger.holders(key)
        first = [prefer] if prefer in self._hosts else []
        for name in dict.fromkeys([*first, *(n for n in known if n in self._hosts), *self._hosts]):
            manifest = self._hosts[name].find_artifact(key)
            if manifest is not None:
                self.ledger.record(manifest, name)
                return Found(manifest=manifest, host=name)
            if name in known:
                self.ledger.forget(key, name)
        return None

    def bring(self, key: str, host: str, *, on_bytes: OnBytes = lambda _done, _total: None) -> Manifest:
        """Make sure that `host` holds `key`, moving it from another holder if need be. Raises StorageError where none has it."""
        with self._moving(host):
            found = self.find(key, prefer=host)
            if found is None:
                raise StorageError(f"No reachable host holds {key}.", "Run again; it will be made anew.")
            if found.host != host:
                copy_artifact(found.manifest, self.host(found.host), self.host(host), on_bytes=on_bytes)
                self.ledger.record(found.manifest, host)
            return found.manifest

    def _moving(self, host: str) -> threading.Lock:
        """One artifact at a time goes to a host: shards that need the same states wait for one copy instead of making two."""
        with self._guard:
            return self._moves.setdefault(host, threading.Lock())

    def ensure(self, work: Work, host: str, *, log_path: Path, deadline_s: float, on_event: OnEvent) -> Found:
        """The artifact of `work`: found on any host, or made on `host`. Small ones are kept on the relay too."""
        found = self.find(work.key, prefer=host)
        if found is None:
            for key, _ in work.inputs.values():
                self.bring(key, host)
            found = self._make(work, host, log_path=log_path, deadline_s=deadline_s, on_event=on_event)
        if STAGES[work.stage].small:
            self.bring(work.key, RELAY)
        return found

    def key_of(self, stage: str, inputs: dict[str, tuple[str, str]], parameters: dict[str, Any]) -> str:
        """The key that this stage would have."""
        return Work(stage=stage, inputs=inputs, parameters=parameters).key

    def listing(self, host: str, path: str) -> list[list[Any]]:
        """[name, size, mtime_ns] of the files of a directory on `host`: changes whenever a file is replaced. Raises InputError."""
        directory = PurePosixPath(path)
        there = self.host(host)
        facts = there.stat(directory)
        if facts is None or not facts.is_dir:
            raise InputError(f"[{host}] {path} is not a directory.", "Give the directory that holds the model's config.json.")
        files = [f for f in there.glob(f"{literal_pattern(directory)}/*") if not f.is_dir]
        return [[f.path.name, f.size_bytes, f.mtime_ns] for f in files]

    def _make(self, work: Work, name: str, *, log_path: Path, deadline_s: float, on_event: OnEvent) -> Found:
        host = self.host(name)
        request = Request(
            stage=work.stage,
            key=work.key,
            work_dir=Path(host.work_dir),
            inputs={role: key for role, (key, _) in work.inputs.items()},
            parameters=work.parameters,
            local=work.local | {"threads": self.inventory.entry(name).threads},
        )
        run = host.run_stage(request, log_path=log_path, deadline_s=deadline_s, on_event=on_event)
        self.ledger.record(run.manifest, name)
        log.info("[%s] %s done in %.1f s, peak %d MiB", name, work.key, run.seconds, run.peak_rss_bytes >> 20)
        return Found(manifest=run.manifest, host=name)


def _open(entry: HostEntry) -> Host:
    sweep(entry.work_dir)
    python = {"python": entry.python} if entry.python else {}
    return LocalHost(entry.name, entry.work_dir, threads=entry.threads, slots=entry.slots, **python)


@functools.lru_cache(maxsize=8)
def open_site(home: str, inventory_path: str | None) -> Site:
    """The site of a run; the same object for the same arguments in one process, so that host slots are shared."""
    base = Path(home)
    inventory = read_inventory(Path(inventory_path), home=base) if inventory_path else single_machine(base)
    return Site(inventory, home=base)


def default_home() -> Path:
    """Where runs, the relay's store and Prefect's data lie: $DFLASH_EVAL_HOME or ~/.dflash-eval."""
    return Path(os.environ.get("DFLASH_EVAL_HOME") or Path.home() / ".dflash-eval").resolve()
