"""The order of an evaluation, written once for two readers: the flow that does it and the plan that only says it.

A `Book` does or plans each stage. In a plan a stage's outcome may be unknown (None); whatever needs it is then planned
without a key. In a flow nothing is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_model.artifacts import Manifest
from flows.parameters import DrafterSource, EvaluateParameters
from tasks.checks import check_drafters
from tasks.configs import extract_parameters, selection_of
from tasks.remote.drafters import RemoteDrafter
from tasks.remote.incoming import drop_incoming, local_facts
from tasks.remote.inventory import Inventory
from tasks.remote.placement import candidates
from tasks.remote.selection import Selection
from tasks.settings import RunPlace

STREAK_WIDTHS = (4, 8)
TREE_BUDGETS = (16, 64)
KEPT_CANDIDATES = 64


class Outcome(Protocol):
    """An artifact that is there."""

    @property
    def key(self) -> str:
        """Artifact key."""
        ...

    @property
    def digest(self) -> str:
        """Content digest."""
        ...

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
        ...


class Waiting(Protocol):
    """A stage that was called."""

    def made(self) -> Outcome | None:
        """Wait; what it made, or None where a plan cannot know."""
        ...


class Book(Protocol):
    """Who does the stages, or only writes down that they would be done."""

    place: RunPlace

    def discover(self, source: DrafterSource, host: str) -> RemoteDrafter:
        """Look for a drafter; only reads."""
        ...

    def prompts(self, path: Path) -> Outcome | None:
        """Take a prompt file into the relay's store."""
        ...

    def relay(self, drafter: RemoteDrafter, selection: Selection, host: str, *, needed_for: str | None) -> Waiting:
        """Bring a drafter's tensors to `host`, unless the artifact `needed_for` exists already."""
        ...

    def stage(
        self,
        name: str,
        *,
        hosts: Sequence[str],
        label: str,
        inputs: Mapping[str, Outcome | None],
        parameters: dict[str, Any] | None,
        local: dict[str, Any] | None = None,
    ) -> Waiting:
        """Find or make a stage's artifact. `parameters` None: not known yet (plans only)."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """One drafter of the run, extracted."""

    source: RemoteDrafter
    """Where it came from."""

    role: str
    """"candidate" or "reference"."""

    name: str
    """Unique in this run."""

    checkpoint: Outcome | None
    """Its checkpoint artifact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What all drafters of a run are replayed on."""

    prompts: Outcome | None
    target: Outcome | None
    tables: Outcome | None
    references: Outcome | None
    states: Outcome | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """Which hosts may run what, for one run."""

    inventory: Inventory
    placement: dict[str, list[str]]
    failover: bool

    def hosts(self, stage: str) -> tuple[str, ...]:
        """Candidates for a stage, best first."""
        return candidates(self.inventory, stage, self.placement, failover=self.failover)


def evaluate_with(book: Book, parameters: EvaluateParameters) -> Outcome | None:
    """All stages in order; the comparison artifact."""
    where = Where(inventory=book.place.site().inventory, placement=parameters.placement, failover=parameters.failover)
    target = _target(book, parameters, where)
    drafters = _drafters(book, parameters, where)
    check_drafters(
        [(d.name, d.checkpoint.manifest.facts) for d in drafters if d.checkpoint], target.manifest.facts if target else None
    )
    ground = _ground(book, parameters, where, target, drafters)
    replays = _replays(book, parameters, where, ground, drafters)
    return _compare(book, parameters, where, ground, drafters, replays)


def _target(book: Book, parameters: EvaluateParameters, where: Where) -> Outcome | None:
    source, site = parameters.target, book.place.site()
    hosts = _preferred(where.hosts("identify-target"), source.host)
    if source.path is not None:
        host = site.first_usable(hosts, what="identify-target")
        hosts = (host,)
        chosen: dict[str, Any] = {"path": source.path, "host": host, "listing": site.listing(host, source.path)}
    else:
        chosen = {"hub_id": source.hub_id, "revision": source.revision}
    return book.stage("identify-target", hosts=hosts, label="identify target", inputs={}, parameters=chosen).made()


def _preferred(hosts: Sequence[str], first: str | None) -> tuple[str, ...]:
    """`hosts` with `first` in front."""
    return tuple(hosts) if first is None else (first, *(name for name in hosts if name != first))


def _drafters(book: Book, parameters: EvaluateParameters, where: Where) -> list[Drafter]:
    """Discover, relay and extract: the reference first, since a candidate may take its config from it."""
    train = where.inventory.with_role("train")[0].name
    evaluator = book.place.site().first_usable(where.hosts("extract-weights"), what="extract-weights")
    sources = [(source, "candidate") for source in parameters.candidates]
    if parameters.reference is not None:
        sources.insert(0, (parameters.reference, "reference"))
    found = [(book.discover(source, source.host or train), role) for source, role in sources]
    names = _unique([remote.name for remote, _ in found])
    reference_facts: dict[str, Any] | None = None
    drafters: list[Drafter] = []
    for (remote, role), name in zip(found, names, strict=True):
        bare = parameters.bare.model_dump()
        selection = selection_of(remote, bare, cast=parameters.cast)
        chosen = extract_parameters(remote, bare, book.place.site(), reference_facts, role=role, selection=selection)
        checkpoint = _extract(book, remote, selection, chosen, host=evaluator, name=name)
        if role == "reference" and checkpoint is not None:
            reference_facts = checkpoint.manifest.facts
        drafters.append(Drafter(source=remote, role=role, name=name, checkpoint=checkpoint))
    return drafters


def _extract(
    book: Book, remote: RemoteDrafter, selection: Selection, chosen: dict[str, Any] | None, *, host: str, name: str
) -> Outcome | None:
    site = book.place.site()
    key = site.key_of("extract-weights", {}, chosen) if chosen is not None else None
    book.relay(remote, selection, host, needed_for=key).made()
    local = local_facts(remote, selection, site.host(host))
    label = f"extract {name}"
    checkpoint = book.stage("extract-weights", hosts=[host], label=label, inputs={}, parameters=chosen, local=local).made()
    if checkpoint is not None:
        drop_incoming(remote, selection, site.host(host))
    return checkpoint


def _unique(names: Sequence[str]) -> list[str]:
    """The same names, those that repeat numbered."""
    return [name if names.count(name) == 1 else f"{name}#{names[: i + 1].count(name)}" for i, name in enumerate(names)]


def _ground(
    book: Book, parameters: EvaluateParameters, where: Where, target: Outcome | None, drafters: Sequence[Drafter]
) -> Ground:
    prompts = book.prompts(parameters.prompts_path)
    source, made = parameters.target, parameters.references
    local = {"target_path": source.path} if source.path is not None else {"hub_id": source.hub_id, "revision": source.revision}

    def hosts(stage: str) -> tuple[str, ...]:
        return _preferred(where.hosts(stage), source.host if stage not in parameters.placement else None)

    tables = book.stage(
        "target-tables",
        hosts=hosts("target-tables"),
        label="target tables",
        inputs={"target": target},
        parameters={},
        local=local,
    )
    references = book.stage(
        "references",
        hosts=hosts("references"),
        label="references",
        inputs={"target": target, "prompts": prompts},
        parameters=made.identity,
        local=local | ({"server": made.server} if made.server else {}),
    )
    checkpoints = [drafter.checkpoint for drafter in drafters]
    states_hosts, engine = _engine_states(book, parameters, hosts("hidden-states"))
    states = book.stage(
        "hidden-states",
        hosts=states_hosts,
        label="hidden states",
        inputs={"target": target, "references": references.made(), "tables": tables.made()},
        parameters=_states_parameters(parameters, checkpoints) | engine if all(checkpoints) else None,
        local=local | parameters.hidden_states.model_dump(include={"extraction", "max_gpu_memory_gib"}, exclude_none=True),
    )
    return Ground(prompts=prompts, target=target, tables=tables.made(), references=references.made(), states=states.made())


def _engine_states(book: Book, parameters: EvaluateParameters, hosts: Sequence[str]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Where the hidden states are made, and an engine's files as a parameter; they lie on one host, so it must be that one."""
    engine = parameters.hidden_states.engine
    if engine is None:
        return tuple(hosts), {}
    host = book.place.site().first_usable(hosts[:1], what="hidden-states")
    listing = book.place.site().listing(host, engine.path)
    return (host,), {"engine": engine.model_dump() | {"listing": listing}}


def _states_parameters(parameters: EvaluateParameters, checkpoints: Sequence[Outcome | None]) -> dict[str, Any]:
    """What decides the states: not whether the target is loaded whole, which gives the same ones."""
    chosen = {"taps": _union_of_taps(checkpoints), "dtype": parameters.references.dtype}
    return chosen | parameters.hidden_states.model_dump(include={"batch", "thresholds"})


def _union_of_taps(checkpoints: Sequence[Outcome | None]) -> list[int]:
    return sorted({tap for checkpoint in checkpoints if checkpoint for tap in checkpoint.manifest.facts["spec"]["tap_indices"]})


def _replays(
    book: Book, parameters: EvaluateParameters, where: Where, ground: Ground, drafters: Sequence[Drafter]
) -> list[list[Outcome | None]]:
    """Every drafter's shards, all called before the first is waited for."""
    called: list[list[Waiting]] = []
    for drafter in drafters:
        inputs = {
            "checkpoint": drafter.checkpoint,
            "states": ground.states,
            "references": ground.references,
            "tables": ground.tables,
        }
        called.append(
            [
                book.stage(
                    "replay",
                    hosts=where.hosts("replay"),
                    label=f"replay {drafter.name}" + (f" {shard + 1}/{parameters.shards}" if parameters.shards > 1 else ""),
                    inputs=inputs,
                    parameters={
                        "shard": [shard, parameters.shards],
                        "tail": parameters.tail,
                        "streak_widths": list(STREAK_WIDTHS),
                        "tree_budgets": list(TREE_BUDGETS),
                        "kept_candidates": KEPT_CANDIDATES,
                        "stride": parameters.stride,
                        "max_new_tokens": parameters.references.max_new_tokens if parameters.tail == "pypi" else None,
                    },
                )
                for shard in range(parameters.shards)
            ]
        )
    return [[waiting.made() for waiting in row] for row in called]


def _compare(
    book: Book,
    parameters: EvaluateParameters,
    where: Where,
    ground: Ground,
    drafters: Sequence[Drafter],
    replays: Sequence[Sequence[Outcome | None]],
) -> Outcome | None:
    inputs: dict[str, Outcome | None] = {"prompts": ground.prompts, "target": ground.target, "references": ground.references}
    rows = []
    for number, (drafter, shards) in enumerate(zip(drafters, replays, strict=True)):
        inputs |= {f"replay-{number}-{shard}": outcome for shard, outcome in enumerate(shards)}
        facts = drafter.checkpoint.manifest.facts if drafter.checkpoint else {}
        rows.append({"name": drafter.name, "role": drafter.role, "step": drafter.source.step, "facts": facts})
    known = ground.states is not None and all(drafter.checkpoint for drafter in drafters)
    chosen = {
        "drafters": rows,
        "fidelity": ground.states.manifest.facts["fidelity"] if ground.states else None,
        "tail": parameters.tail,
        "equal_within": parameters.equal_within,
        "stride": parameters.stride,
    }
    return book.stage(
        "compare", hosts=where.hosts("compare"), label="compare", inputs=inputs, parameters=chosen if known else None
    ).made()
