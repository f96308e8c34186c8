"""Calling tasks so that the store decides first: Prefect's cache may answer only for an artifact that is really there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefect.futures import PrefectFuture
from prefect.tasks import Task

from dflash_model.artifacts import Manifest
from dflash_model.errors import ArtifactLost
from tasks.events import Event, tell
from tasks.remote.site import Work
from tasks.settings import RunPlace
from tasks.stages import TASK_OF


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """An artifact that a finished stage stands for."""

    key: str
    """Artifact key."""

    digest: str
    """Content digest."""

    manifest: Manifest
    """As some holder has it now."""

    @property
    def ref(self) -> tuple[str, str]:
        """(key, digest), the form in which `Work.inputs` names it."""
        return self.key, self.digest


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRow:
    """One line of a run's account: what ran where, or did not have to."""

    name: str
    """For people."""

    host: str
    """Where it ran, or would have."""

    state: str
    """"ran" or "cached"."""

    seconds: float
    """From call to result; 0 when cached."""

    moved_bytes: int | None = None
    """Of a relay that ran: bytes written on the other host."""

    source_bytes: int | None = None
    """Of a relay that ran: size of the checkpoint of which they are a part."""

    def to_json(self) -> dict[str, Any]:
        """A row of run.json; what it says nothing of is left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Pending:
    """A called stage; `result()` waits and gives what it made. It is noted in the account when it ends, not when asked for."""

    def __init__(self, future: PrefectFuture[Any], *, label: str, host: str, book: Account, present: bool) -> None:
        self._future, self._label, self._host, self._book, self._present = future, label, host, book, present
        self._started = time.monotonic()
        self._noted = threading.Event()
        future.add_done_callback(self._note)

    def _note(self, future: PrefectFuture[Any]) -> None:
        try:
            future.wait()
            state = future.state
            if state.is_completed():
                cached = self._present or state.name == "Cached"
                seconds = 0.0 if cached else round(time.monotonic() - self._started, 2)
                self._book.add(
                    StageRow(
                        name=self._label,
                        host=self._where(future),
                        state="cached" if cached else "ran",
                        seconds=seconds,
                        **({} if cached else self._moved(future)),
                    )
                )
            else:
                tell(Event(what="failed", stage=self._label, host=self._host, message=state.message or ""))
        finally:
            self._noted.set()

    def _where(self, future: PrefectFuture[Any]) -> str:
        """The host that ran it, which need not be the first candidate."""
        answer = future.result()
        return str(answer.get("host") or self._host) if isinstance(answer, dict) else self._host

    def _moved(self, future: PrefectFuture[Any]) -> dict[str, int]:
        answer = future.result()
        return {name: answer[name] for name in ("moved_bytes", "source_bytes") if name in answer}

    def value(self) -> Any:
        """The task's result. Raises what the task raised."""
        answer = self._future.result()
        self._noted.wait()
        return answer

    def result(self) -> Made:
        """What the stage made, found on a reachable host. Raises EvalError."""
        answer = self.value()
        found = self._book.place.site().find(answer["key"])
        if found is None:
            raise ArtifactLost(
                f"{self._label}: {answer['key']} is on no reachable host any more.", "Run again; it will be made anew."
            )
        return Made(key=answer["key"], digest=found.manifest.digest, manifest=found.manifest)


class Account:
    """What a run has done so far."""

    def __init__(self, place: RunPlace) -> None:
        self.place = place
        self.rows: list[StageRow] = []

    def add(self, row: StageRow) -> None:
        """Note one finished stage and tell listeners."""
        self.rows.append(row)
        tell(Event(what=row.state, stage=row.name, host=row.host, seconds=row.seconds))

    def stage(self, work: Work, *, hosts: Sequence[str], label: str, redo: bool = False) -> Pending:
        """Call the task of `work` with candidates `hosts`; does not wait. `redo`: throw away what an earlier run made."""
        site = self.place.site()
        if redo:
            site.discard(work.key)
        present = site.find(work.key, prefer=hosts[0]) is not None
        arguments = {"work": work.to_json(), "hosts": list(hosts), "label": label, "place": self.place.to_json()}
        return self.call(TASK_OF[work.stage], arguments, key=work.key, present=present, host=hosts[0])

    def call(self, task: Task[..., Any], arguments: dict[str, Any], *, key: str, present: bool, host: str) -> Pending:
        """Call any cached task under `key`; `present` says whether its outcome is in place, else the cache is refreshed."""
        label = arguments["label"]
        tell(Event(what="started", stage=label, host=host))
        chosen: Callable[..., Any] = task.with_options(refresh_cache=not present).submit
        future = chosen(key=key, **arguments)
        return Pending(future, label=label, host=host, book=self, present=present)
