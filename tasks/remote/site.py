"""The site: all hosts, the ledger, and the two questions every task asks. Is it there? If not, make it there.

`Work` names a stage's output before it exists; `Site.ensure` finds it on any host, or brings the inputs and runs it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_model.artifacts import Manifest
from dflash_model.digests import stage_key
from dflash_model.errors import ArtifactLost, HostError, InputError
from dflash_model.stages.protocol import Request
from dflash_model.stages.registry import STAGES
from tasks.remote.choice import Choice, OnSkip
from tasks.remote.gpu_lock import this_holder
from tasks.remote.host import Host, OnEvent, literal_pattern
from tasks.remote.inventory import RELAY, Inventory, read_inventory, single_machine
from tasks.remote.ledger import Ledger
from tasks.remote.opening import open_host
from tasks.remote.placement import NEEDS_GPU, Avoided
from tasks.remote.transfer import OnBytes, artifact_path, copy_artifact

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


def _say_nothing(_host: str, _reason: str) -> None:
    return


class Site:
    """Hosts by name, and what lies where."""

    def __init__(self, inventory: Inventory, *, home: Path) -> None:
        self.inventory = inventory
        self.home = home
        self.ledger = Ledger(home / RELAY / "ledger")
        opened = {entry.name: open_host(entry) for entry in inventory.hosts}
        self._hosts = {name: one.host for name, one in opened.items()}
        self._gpus = {name: one.gpus for name, one in opened.items()}
        self._sweeps = {name: one.sweep for name, one in opened.items()}
        self._holders = [entry.name for entry in inventory.hosts if entry.roles != ("train",)]
        self.avoided = Avoided()
        self._guard = threading.Lock()
        self._moves: dict[str, threading.Lock] = {}

    def host(self, name: str) -> Host:
        """The host called `name`. Raises InputError."""
        self.inventory.entry(name)
        return self._hosts[name]

    def sweep(self) -> None:
        """Remove what killed writers left on the hosts that this run uses. Problems are only logged."""
        for name, sweep in self._sweeps.items():
            if self.avoided.reason(name) is None:
                sweep()

    def close(self) -> None:
        """Give up every connection; the next question opens them anew."""
        for host in self._hosts.values():
            host.close()

    def find(self, key: str, *, prefer: str | None = None) -> Found | None:
        """A host that holds `key` and its parts completely, asked now; None where no reachable host does."""
        known = self.ledger.holders(key)
        first = [prefer] if prefer in self._hosts else []
        for name in dict.fromkeys([*first, *(n for n in known if n in self._hosts), *self._holders]):
            try:
                manifest = None if self.avoided.reason(name) else self._hosts[name].find_artifact(key)
            except HostError as exc:
                self.avoided.note(name, exc.problem)
                continue
            if manifest is not None:
                self.ledger.record(manifest, name)
                return Found(manifest=manifest, host=name)
            if name in known and not self.avoided.reason(name):
                self.ledger.forget(key, name)
        return None

    def first_usable(self, names: Sequence[str], *, what: str) -> str:
        """The first host that answers and has a work directory. Raises HostError with every reason where none does."""
        reasons = []
        for name in names:
            reason = self.avoided.reason(name)
            if reason is None:
                try:
                    self.host(name).free_bytes()
                    return name
                except HostError as exc:
                    reason = exc.problem
                    self.avoided.note(name, reason)
            reasons.append(reason)
        raise HostError(f"No host can be used for {what}: {' '.join(reasons)}", "Mend one of them, or name another with --place.")

    def discard(self, key: str) -> None:
        """Remove `key` and its parts from every reachable host, so that they are made anew. Raises EvalError."""
        while (found := self.find(key)) is not None:
            self.host(found.host).remove(artifact_path(self.host(found.host), key))
            self.ledger.forget(key, found.host)
            for part in found.manifest.parts:
                self.discard(part)

    def bring(self, key: str, host: str, *, on_bytes: OnBytes = lambda _done, _total: None) -> Manifest:
        """Make sure that `host` holds `key`, moving it from another holder if need be. Raises ArtifactLost where none has it."""
        with self._moving(host):
            found = self.find(key, prefer=host)
            if found is None:
                raise ArtifactLost(f"No reachable host holds {key}.", "Run again; it will be made anew.")
            if found.host != host:
                copy_artifact(found.manifest, self.host(found.host), self.host(host), on_bytes=on_bytes)
                self.ledger.record(found.manifest, host)
            return found.manifest

    def _moving(self, host: str) -> threading.Lock:
        """One artifact at a time goes to a host: shards that need the same states wait for one copy instead of making two."""
        with self._guard:
            return self._moves.setdefault(host, threading.Lock())

    def ensure(
        self,
        work: Work,
        hosts: Sequence[str],
        *,
        log_path: Path,
        deadline_s: float,
        on_event: OnEvent,
        on_skip: OnSkip = _say_nothing,
        on_wait: OnSkip = _say_nothing,
        run_id: str = "",
        gpu_wait_s: float = 0.0,
    ) -> Found:
        """The artifact of `work`: found on any host, or made on the first of `hosts` that can. Small ones are kept on the relay too.

        `run_id` tells others who holds a GPU. Where others have all GPUs, one is waited for, up to `gpu_wait_s`. Raises HostError
        with every candidate's reason where none can; a stage's own error is raised as it is.
        """
        found = self.find(work.key, prefer=hosts[0])
        if found is None:

            def make(name: str, ticket: str | None) -> Found:
                for key, _ in work.inputs.values():
                    self.bring(key, name)
                return self._make(
                    work, name, log_path=log_path, deadline_s=deadline_s, on_event=on_event, run_id=run_id, ticket=ticket
                )

            choice = Choice(work.stage, hosts, avoided=self.avoided, on_skip=on_skip, on_wait=on_wait, leave=self._leave_queue)
            found = choice.first_that_can(make, wait_s=gpu_wait_s)
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

    def _leave_queue(self, name: str, ticket: str) -> None:
        gpus = self._gpus[name]
        if gpus is not None:
            gpus.leave(ticket)

    def _make(
        self,
        work: Work,
        name: str,
        *,
        log_path: Path,
        deadline_s: float,
        on_event: OnEvent,
        run_id: str,
        ticket: str | None,
    ) -> Found:
        host = self.host(name)
        with self._gpu_facts(work, name, run_id, ticket) as gpu:
            request = Request(
                stage=work.stage,
                key=work.key,
                work_dir=Path(host.work_dir),
                inputs={role: key for role, (key, _) in work.inputs.items()},
                parameters=work.parameters,
                local=work.local | {"threads": self.inventory.entry(name).threads} | gpu,
            )
            run = host.run_stage(request, log_path=log_path, deadline_s=deadline_s, on_event=on_event)
        self.ledger.record(run.manifest, name)
        log.info("[%s] %s done in %.1f s, peak %d MiB", name, work.key, run.seconds, run.peak_rss_bytes >> 20)
        return Found(manifest=run.manifest, host=name)

    @contextmanager
    def _gpu_facts(self, work: Work, name: str, run_id: str, ticket: str | None) -> Iterator[dict[str, Any]]:
        """What a request says of its GPU, which is held while the body runs; {} where the stage or the host has none to hold."""
        # A stage that asks a serving engine computes nothing itself, and the engine is likely to fill the GPU.
        gpus = self._gpus[name] if work.stage in NEEDS_GPU and "server" not in work.local else None
        if gpus is None:
            yield {}
            return
        with gpus.holding(this_holder(run_id), ticket=ticket) as gpu:
            yield gpu.local


def open_site(home: str, inventory_path: str | None) -> Site:
    """The site of a run; the same object in one process, so that host slots are shared, until the inventory file changes."""
    changed_ns = Path(inventory_path).stat().st_mtime_ns if inventory_path and Path(inventory_path).exists() else 0
    return _open_site(home, inventory_path, changed_ns)


@functools.lru_cache(maxsize=8)
def _open_site(home: str, inventory_path: str | None, _changed_ns: int) -> Site:
    base = Path(home)
    inventory = read_inventory(Path(inventory_path), home=base) if inventory_path else single_machine(base)
    return Site(inventory, home=base)


def default_home() -> Path:
    """Where runs, the relay's store and Prefect's data lie: $DFLASH_EVAL_HOME or ~/.dflash-eval."""
    return Path(os.environ.get("DFLASH_EVAL_HOME") or Path.home() / ".dflash-eval").resolve()
