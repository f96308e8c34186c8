"""Prefect tasks that find drafters on training hosts and bring them where they are evaluated."""

from __future__ import annotations

from typing import Any

from prefect import task

from tasks.moving import Meter
from tasks.remote.drafters import RemoteDrafter, discover
from tasks.remote.selection import Selection
from tasks.remote.selective import relay
from tasks.settings import ALWAYS, CACHED, RunPlace


@task(name="discover", task_run_name="discover {label} on {host}", **ALWAYS)
def discover_drafter(host: str, pattern: str, name: str | None, label: str, place: dict[str, Any]) -> dict[str, Any]:
    """The newest complete checkpoint under a path or glob; only looks, so it is never cached."""
    return discover(RunPlace(**place).site().host(host), pattern, name=name).to_json()


@task(name="relay", task_run_name="{label} to {host}", **CACHED)
def relay_drafter(
    key: str, drafter: dict[str, Any], selection: dict[str, Any], host: str, label: str, place: dict[str, Any], *, needed: bool
) -> dict[str, Any]:
    """Stream a drafter's tensors to `host`; verify before the rename. Not `needed`: what they are for exists already."""
    if not needed:
        return {"key": key}
    run = RunPlace(**place)
    site, found = run.site(), RemoteDrafter.from_json(drafter)
    meter = Meter(label, host, source_bytes=found.size_bytes)
    extracted = relay(
        found, Selection(**selection), site.host(found.host), site.host(host), journals=run.journals, on_bytes=meter
    )
    return {"key": key} | (meter.finished(extracted.transfer) if extracted else {})
