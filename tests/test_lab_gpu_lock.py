"""GPU locks across real hosts: a night whose first GPU somebody else holds, and a lock whose link is cut for a while."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from lab import Lab

from flows.parameters import EvaluateParameters
from tasks.events import Event
from tasks.remote.gpu_lock import GpuLocks
from tests.gpu_bench import OTHER, busy, leave_lock, name_gpus, span
from tests.lab_hosts import LabHosts
from tests.lab_night import run

pytestmark = pytest.mark.lab


def lock_file(lab: Lab, host: str) -> Path:
    return lab.disk(host) / "work" / "locks" / "gpu-0"


@pytest.mark.usefixtures("prefect_api")
def test_a_night_whose_first_gpu_is_held_runs_on_the_next_host_and_says_why(
    lab: Lab, night_before: Callable[[str | None], EvaluateParameters]
) -> None:
    night = night_before("target-tables")
    name_gpus(Path(str(night.inventory)))
    leave_lock(lock_file(lab, "gpu-a"), expires_in_s=600)
    before = lock_file(lab, "gpu-a").read_text()
    said: list[str] = []
    holders: set[str] = set()

    def hear(event: Event) -> None:
        said.append(event.message)
        if (
            event.stage in ("references", "hidden states")
            and event.what in ("note", "progress")
            and lock_file(lab, "gpu-b").exists()
        ):
            holders.add(json.loads(lock_file(lab, "gpu-b").read_text())["holder"])

    outcome = run(night, hear)
    where = {row["name"]: row["host"] for row in outcome["stages"]}
    assert (where["references"], where["hidden states"]) == ("gpu-b", "gpu-b")
    # What needs no GPU, and what gpu-a holds, is not kept from it.
    assert (where["identify target"], where["target tables"]) == ("gpu-a", "gpu-a")
    reason = f"[gpu-a] no GPU is free: gpu 0 is held by {OTHER} {span(lock_file(lab, 'gpu-a'))}."
    for stage in ("references", "hidden states"):
        assert f"{stage}: gpu-a is passed over: {reason}" in said
    assert lock_file(lab, "gpu-a").read_text() == before
    (holder,) = holders
    assert holder.endswith(f" run {outcome['run_id']}")
    assert not lock_file(lab, "gpu-b").exists()


def test_a_lock_survives_a_cut_link_and_is_given_back(lab: Lab, lab_hosts: LabHosts) -> None:
    def locks(lifetime_s: float = 60.0) -> GpuLocks:
        work_dir = PurePosixPath(lab.work)
        shell = lab_hosts.shell("gpu-a")
        return GpuLocks(shell, work_dir=work_dir, python=sys.executable, gpus=(0,), min_free_gib=None, lifetime_s=lifetime_s)

    with locks(lifetime_s=16).holding("a"):
        first = json.loads(lock_file(lab, "gpu-a").read_text())["expires_at"]
        lab.cut_link("gpu-a")
        try:
            time.sleep(5)
        finally:
            lab.mend_link("gpu-a")
        end = time.monotonic() + 12
        while json.loads(lock_file(lab, "gpu-a").read_text())["expires_at"] <= first and time.monotonic() < end:
            time.sleep(0.2)
        assert json.loads(lock_file(lab, "gpu-a").read_text())["expires_at"] > first, "renewed over a new connection"
        assert "[gpu-a] no GPU is free: gpu 0 is held by a since" in busy(locks())
    assert not lock_file(lab, "gpu-a").exists()
    with locks().holding("next"):
        assert json.loads(lock_file(lab, "gpu-a").read_text())["holder"] == "next"
