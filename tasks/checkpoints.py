"""Prefect tasks that find drafters on training hosts and bring them where they are evaluated."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.events import Event, tell
from tasks.remote.drafters import RemoteDrafter, discover, relay
from tasks.settings import ALWAYS, CACHED, RunPlace


@task(name="discover", task_run_name="discover {label} on {host}", **ALWAYS)
def discover_drafter(host: str, pattern: str, name: str | None, label: str, place: dict[str, Any]) -> dict[str, Any]:
    """The newest complete checkpoint under a path or glob; only looks, so it is never cached."""
    return discover(RunPlace(**place).site().host(host), pattern, name=name).to_json()


@task(name="relay", task_run_name="{label} to {host}", **CACHED)
def relay_drafter(
    key: str, drafter: dict[str, Any], host: str, label: str, place: dict[str, Any], *, needed: bool
) -> dict[str, Any]:
    """Stream a drafter's files to `host`; verify before the rename. Not `needed`: what they are for exists already."""
    if not needed:
        return {"key": key, "moved_bytes": 0}
    site = RunPlace(**place).site()
    found = RemoteDrafter.from_json(drafter)

    def on_bytes(done: int, total: int) -> None:
        tell(Event(what="progress", stage=label, host=host, done=done, total=total, unit="bytes"))

    moved = relay(found, site.host(found.host), site.host(host), on_bytes=on_bytes)
    return {"key": key, "moved_bytes": moved}
