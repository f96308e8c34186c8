"""One Prefect task a stage program. All take the same four parameters and do the same one call."""

from __future__ import annotations

import logging
from typing import Any

from prefect import task
from prefect.tasks import Task

from tasks.events import Event, tell
from tasks.progress import ProgressArtifact, run_logger
from tasks.remote.site import Work
from tasks.settings import CACHED, RunPlace

log = logging.getLogger(__name__)


def run_work(work: dict[str, Any], hosts: list[str], label: str, place: dict[str, Any]) -> dict[str, str]:
    """Find or make the artifact of `work` on the first of `hosts` that can; the plain function behind every stage task."""
    run = RunPlace(**place)
    job = Work.from_json(work)
    watcher = _Watcher(label, hosts[0])
    log_path = run.log_path(_file_name(label))
    found = run.site().ensure(
        job,
        hosts,
        log_path=log_path,
        deadline_s=run.deadline_s,
        on_event=watcher,
        on_skip=watcher.skipped,
        on_wait=watcher.waiting,
        run_id=run.run_id,
        gpu_wait_s=run.gpu_wait_s,
    )
    return {"key": found.manifest.key, "digest": found.manifest.digest, "kind": found.manifest.kind, "host": found.host}


class _Watcher:
    """Passes a stage program's events on: to listeners, to Prefect's log, and to a progress artifact when it takes long."""

    def __init__(self, label: str, host: str) -> None:
        self._label, self._host = label, host
        self._artifact = ProgressArtifact(f"{label} on {host}")
        self._log = run_logger(log)

    def __call__(self, event: dict[str, Any]) -> None:
        if event.get("event") == "milestone":
            message = str(event["message"])
            self._log.info("[%s] %s: %s", self._host, self._label, message)
            tell(Event(what="note", stage=self._label, host=self._host, message=message))
        elif event.get("event") == "progress":
            done, total = int(event["done"]), int(event["total"])
            tell(Event(what="progress", stage=self._label, host=self._host, done=done, total=total, unit=str(event["unit"])))
            self._artifact.show(100.0 * done / max(total, 1))

    def skipped(self, host: str, reason: str) -> None:
        """A candidate was passed over."""
        self._warn(host, f"{self._label}: {host} is passed over: {reason}")

    def waiting(self, host: str, reason: str) -> None:
        """Others use all GPUs; that host's are waited for."""
        self._warn(host, f"{self._label}: {reason}")

    def _warn(self, host: str, message: str) -> None:
        self._log.warning(message)
        tell(Event(what="note", stage=self._label, host=host, message=message))


def _file_name(label: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in label)


def _stage_task(name: str, description: str) -> Task[..., dict[str, str]]:
    """The Prefect task of one stage program."""

    @task(name=name, description=description, task_run_name="{label}", **CACHED)
    def stage(key: str, work: dict[str, Any], hosts: list[str], label: str, place: dict[str, Any]) -> dict[str, str]:
        return run_work(work, hosts, label, place)

    return stage


TASK_OF: dict[str, Task[..., dict[str, str]]] = {
    "identify-target": _stage_task("identify target", "Fingerprint the target's files where they lie."),
    "extract-weights": _stage_task(
        "extract weights", "Take the drafter out of a training checkpoint: model.safetensors and its spec."
    ),
    "target-tables": _stage_task("target tables", "Embedding, head and final norm of the target as one small artifact."),
    "references": _stage_task("references", "Greedy completions of the target as token ids."),
    "hidden-states": _stage_task("hidden states", "One prefill a sample; the wanted layers, behind the fidelity gate."),
    "replay": _stage_task("replay", "Replay one drafter on one shard of the samples."),
    "compare": _stage_task("compare", "Metrics, paired differences and verdicts from the records."),
}
"""Stage name -> its task."""
