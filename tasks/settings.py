"""What all tasks share: how results are kept, which errors are worth another try, and where a run keeps its logs.

Results are small JSON manifests under our own keys. The store decides before Prefect's cache may answer (see call.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TaskRunContext
from prefect.tasks import Task

from dflash_model.errors import HostError
from tasks.remote.inventory import RELAY
from tasks.remote.site import Site, open_site


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlace:
    """Where one flow run finds its site and leaves its logs. JSON-able: it travels as a task parameter."""

    run_id: str
    """Name of the run's directory."""

    home: str
    """The relay's home."""

    inventory: str | None
    """Hosts file; None: this machine alone."""

    deadline_s: float
    """Longest time of one stage."""

    gpu_wait_s: float = 0.0
    """How long a stage waits where others use every GPU it could have."""

    def site(self) -> Site:
        """The site, opened once a process."""
        return open_site(self.home, self.inventory)

    @property
    def directory(self) -> Path:
        """`<home>/runs/<run id>`."""
        return Path(self.home) / "runs" / self.run_id

    @property
    def journals(self) -> Path:
        """Where this relay notes how far its transfers got, whichever run they belong to."""
        return Path(self.home) / RELAY / "transfers"

    def log_path(self, name: str) -> Path:
        """Log file of one stage of this run."""
        return self.directory / "logs" / f"{name}.log"

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `RunPlace(**value)` reads it back."""
        return asdict(self)


def worth_retrying(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Only a host that could not be reached; a stage's own error would come again."""
    return isinstance(state.data, HostError) or "HostError" in (state.message or "")


def key_of_call(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    """The cache key that the caller computed."""
    return str(parameters["key"])


CACHED: dict[str, Any] = {
    "cache_key_fn": key_of_call,
    "persist_result": True,
    "result_serializer": "json",
    "retries": 2,
    "retry_delay_seconds": [5, 30],
    "retry_condition_fn": worth_retrying,
}
"""Options of a task whose result is a manifest under a content key."""

ALWAYS: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 2,
    "retry_delay_seconds": [5, 30],
    "retry_condition_fn": worth_retrying,
}
"""Options of a task that looks at the world or publishes: never answered from a cache."""
