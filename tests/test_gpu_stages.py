"""Which GPU a stage gets and what it hears of it; a host whose GPUs are taken is passed over but stays in use."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from dflash_model.errors import Cancelled, HostBusy, HostError, HostTaken, StageError
from dflash_model.stages.protocol import Request
from tasks.remote.checking import check_hosts
from tasks.remote.code import pack_code
from tasks.remote.gpu_lock import HeldGpu, lock_sentence, this_holder
from tasks.remote.inventory import read_inventory
from tasks.remote.local import LocalHost
from tasks.remote.local_shell import LocalShell
from tasks.remote.placement import NEEDS_GPU
from tasks.remote.processes import end_everything
from tasks.remote.remote_runner import RemoteRunner
from tasks.remote.site import Found, Site, Work
from tests.gpu_bench import OTHER, GpuBench, busy, leave_lock, span
from tests.local_shell import LocalShell as FaultyShell

ROOT = Path(__file__).resolve().parent.parent

FAKE = """
import json, os, runpy, sys, time, types
def run(context):
    locks = context.request.work_dir / "locks"
    context.milestone(json.dumps({
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "order": os.environ.get("CUDA_DEVICE_ORDER"),
        "device": context.local.get("device", "cpu"), "locked": sorted(p.name for p in locks.glob("gpu-*")),
        "holders": sorted(json.loads(p.read_text())["holder"] for p in locks.glob("gpu-*"))}))
    time.sleep(context.parameters.get("sleep_s", 0))
    if context.parameters.get("fail"):
        raise ZeroDivisionError("oops")
    with context.writing() as writer:
        (writer.path / "out.txt").write_text("x")
for name in ("references", "hidden_states", "target_tables"):
    sys.modules[f"dflash_model.stages.{name}"] = types.ModuleType(name)
    sys.modules[f"dflash_model.stages.{name}"].run = run
module, *arguments = sys.argv[2:]
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Stands in for a host's Python: every stage that loads the target says which GPU it sees and which are locked meanwhile."""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuBench:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return GpuBench(tmp_path, monkeypatch)


@pytest.fixture
def python(tmp_path: Path) -> str:
    (tmp_path / "fake.py").write_text(FAKE)
    path = tmp_path / "python"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = -m ] || exec "{sys.executable}" "$@"\n'
        f'PYTHONPATH="${{PYTHONPATH:-{ROOT}}}" exec "{sys.executable}" "{tmp_path}/fake.py" "$@"\n'
    )
    path.chmod(0o755)
    return str(path)


class TwoHosts:
    """Hosts a and b with one GPU each, opened as a run opens them."""

    def __init__(self, tmp_path: Path, python: str, *, more: str = "") -> None:
        lines = [f"  {name}: {{work_dir: {name}, roles: [target], python: {python}, gpus: [0]{more}}}" for name in ("a", "b")]
        (tmp_path / "hosts.yaml").write_text("hosts:\n" + "\n".join(lines) + "\n")
        self._base = tmp_path
        self.site = Site(read_inventory(tmp_path / "hosts.yaml", home=tmp_path / "home"), home=tmp_path / "home")
        self.skipped: list[tuple[str, str]] = []
        self.waited: list[tuple[str, str]] = []
        self.said: list[dict[str, Any]] = []

    def lock_file(self, host: str) -> Path:
        return self._base / host / "locks" / "gpu-0"

    def ensure(self, stage: str, *hosts: str, gpu_wait_s: float = 0.0, **parameters: Any) -> Found:
        return self.site.ensure(
            Work(stage=stage, inputs={}, parameters=parameters),
            hosts or ("a", "b"),
            log_path=self._base / "log",
            deadline_s=60,
            on_event=self._hear,
            on_skip=lambda host, reason: self.skipped.append((host, reason)),
            on_wait=lambda host, reason: self.waited.append((host, reason)),
            run_id="r1",
            gpu_wait_s=gpu_wait_s,
        )

    def _hear(self, event: dict[str, Any]) -> None:
        if event["event"] == "milestone":
            self.said.append(json.loads(event["message"]))


@pytest.mark.parametrize("stage", NEEDS_GPU)
def test_a_stage_that_loads_the_target_holds_a_gpu_and_sees_no_other(
    bench: GpuBench, tmp_path: Path, python: str, stage: str
) -> None:
    hosts = TwoHosts(tmp_path, python)
    assert hosts.ensure(stage).host == "a"
    (said,) = hosts.said
    assert said == {
        "visible": "0",
        "order": "PCI_BUS_ID",
        "device": "cpu",
        "locked": ["gpu-0"],
        "holders": [f"{os.uname().nodename} pid {os.getpid()} run r1"],
    }
    assert not hosts.lock_file("a").exists()
    bench.nvidia_smi("0, 80000, 81920")
    hosts.ensure(stage, number=2)
    assert hosts.said[1]["device"] == "cuda"


def test_other_stages_need_no_gpu(bench: GpuBench, tmp_path: Path, python: str) -> None:
    hosts = TwoHosts(tmp_path, python)
    leave_lock(hosts.lock_file("a"), expires_in_s=60)
    assert hosts.ensure("target-tables").host == "a"
    assert hosts.said[0] | {"holders": []} == {
        "visible": None,
        "order": None,
        "device": "cpu",
        "locked": ["gpu-0"],
        "holders": [],
    }


def test_a_host_whose_gpu_is_held_is_passed_over_but_stays_in_use(bench: GpuBench, tmp_path: Path, python: str) -> None:
    hosts = TwoHosts(tmp_path, python)
    tables = hosts.ensure("target-tables", "a")
    leave_lock(hosts.lock_file("a"), expires_in_s=60)
    before = hosts.lock_file("a").read_text()
    assert hosts.ensure("references").host == "b"
    reason = f"[a] no GPU is free: gpu 0 is held by {OTHER} {span(hosts.lock_file('a'))}."
    assert hosts.skipped == [("a", reason)]
    assert hosts.lock_file("a").read_text() == before
    # It is neither dead nor forgotten: what it holds can be had, and the next stage may find its GPU free.
    found = hosts.site.find(tables.manifest.key)
    assert found is not None
    assert found.host == "a"
    hosts.lock_file("a").unlink()
    assert hosts.ensure("hidden-states").host == "a"


def test_where_every_gpu_is_held_each_is_named(bench: GpuBench, tmp_path: Path, python: str) -> None:
    bench.nvidia_smi("0, 3277, 20480")
    hosts = TwoHosts(tmp_path, python, more=", min_gpu_memory_gib: 16")
    leave_lock(hosts.lock_file("b"), expires_in_s=60)
    with pytest.raises(HostError) as caught:
        hosts.ensure("references")
    assert caught.value.problem == (
        "No host can run references: [a] no GPU is free: gpu 0 has 3.2 of 20 GiB free, wanted are 16. "
        f"[b] no GPU is free: gpu 0 is held by {OTHER} {span(hosts.lock_file('b'))}."
    )
    with pytest.raises(HostBusy):
        hosts.ensure("references", "a")


def test_a_stage_that_fails_gives_its_gpu_back(bench: GpuBench, tmp_path: Path, python: str) -> None:
    hosts = TwoHosts(tmp_path, python)
    with pytest.raises(StageError, match="oops"):
        hosts.ensure("references", fail=True)
    assert hosts.said[0]["locked"] == ["gpu-0"]
    assert not hosts.lock_file("a").exists()


def test_two_stages_at_a_time_take_the_gpus_of_two_hosts(bench: GpuBench, tmp_path: Path, python: str) -> None:
    hosts = TwoHosts(tmp_path, python)
    first_is_in, second_is_done = threading.Event(), threading.Event()
    hear = hosts._hear

    def hold(event: dict[str, Any]) -> None:
        hear(event)
        first_is_in.set()
        assert second_is_done.wait(timeout=30)

    work = Work(stage="references", inputs={}, parameters={})
    found: list[Found] = []
    ensure = hosts.site.ensure
    first = threading.Thread(
        target=lambda: found.append(ensure(work, ("a", "b"), log_path=tmp_path / "log", deadline_s=60, on_event=hold))
    )
    first.start()
    assert first_is_in.wait(timeout=30)
    try:
        assert hosts.ensure("hidden-states").host == "b"
    finally:
        second_is_done.set()
        first.join(timeout=30)
    assert [one.host for one in found] == ["a"]


def test_the_gpu_of_a_stage_that_runs_on_is_taken_until_its_end_and_no_longer(
    bench: GpuBench, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch, living: Callable[[Path], list[str]]
) -> None:
    """The link goes down, the host is given up, the link is back at once: the stage runs on until its lease lapses.

    The lock itself ends long before; the stage's own life is what counts, and its end.
    """
    monkeypatch.setenv("PATH", os.defpath)
    shell, work_dir = FaultyShell(), PurePosixPath(bench.work_dir)
    runner = RemoteRunner(
        shell, work_dir=work_dir, python=python, code=pack_code(), threads=1, slots=1, poll_s=0.05, lease_s=6, grace_s=0.6
    )

    def run_stage() -> None:
        with bench.locks(shell=LocalShell("h"), lifetime_s=0.4).holding("a") as gpu:
            request = Request(
                stage="references",
                key="references-x",
                work_dir=bench.work_dir,
                inputs={},
                parameters={"sleep_s": 60},
                local=gpu.local,
            )
            runner.run(request, log_path=tmp_path / "log", deadline_s=60, on_event=lambda _e: shell.cut(7))

    with pytest.raises(HostError, match="could not be confirmed that it is gone"):
        run_stage()
    (supervisor,) = bench.work_dir.glob("runs/*/pid")
    number = json.loads(supervisor.read_text())["pid"]
    os.kill(number, signal.SIGSTOP)  # its lease may not end while we look
    lock = json.loads(bench.lock_file().read_text())
    bench.lock_file().write_text(json.dumps(lock | {"process": None}))  # as of a relay that is another machine, and dead
    time.sleep(0.5)
    assert "gpu 0 is held by a since" in (said := busy(bench.locks()))
    assert f", whose stage still runs in {bench.work_dir}/runs/references-x-" in said
    bench.lock_file().rename(tmp_path / "removed by hand")
    assert f"gpu 0 is used by the stage that runs in {bench.work_dir}/runs/references-x-" in busy(bench.locks())
    (tmp_path / "removed by hand").rename(bench.lock_file())
    os.kill(number, signal.SIGCONT)
    end = time.monotonic() + 20
    while living(tmp_path) and time.monotonic() < end:
        time.sleep(0.05)
    assert living(tmp_path) == []
    with bench.locks().holding("next"):
        pass


def test_a_stage_does_not_start_on_a_gpu_that_was_given_to_another(
    bench: GpuBench, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that comes late, after a cut link that outlasted the lock."""
    monkeypatch.setenv("PATH", os.defpath)
    runner = RemoteRunner(
        LocalShell("h"),
        work_dir=PurePosixPath(bench.work_dir),
        python=python,
        code=pack_code(),
        threads=1,
        slots=1,
        poll_s=0.05,
    )

    def run_with(local: dict[str, Any], key: str) -> None:
        request = Request(stage="references", key=key, work_dir=bench.work_dir, inputs={}, parameters={}, local=local)
        runner.run(request, log_path=tmp_path / "log", deadline_s=60, on_event=lambda _e: None)

    with bench.locks().holding("a") as lost:
        bench.lock_file().unlink()
        with bench.locks().holding("b") as held:
            with pytest.raises(HostError, match="the GPU was given to another meanwhile"):
                run_with(lost.local, "references-x")
            run_with(held.local, "references-y")


def test_a_gpu_that_others_use_is_waited_for_while_no_other_host_has_one(
    bench: GpuBench, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.remote.choice.ASK_EVERY_S", 0.2)
    hosts = TwoHosts(tmp_path, python)
    for name in ("a", "b"):
        leave_lock(hosts.lock_file(name), expires_in_s=60)
    reason = f"[b] no GPU is free: gpu 0 is held by {OTHER} {span(hosts.lock_file('b'))}."
    threading.Timer(1.0, hosts.lock_file("b").unlink).start()
    assert hosts.ensure("references", gpu_wait_s=30).host == "b"
    assert [host for host, _ in hosts.skipped] == ["a", "b"]
    assert [host for host, _ in hosts.waited] == ["a", "b"]
    assert hosts.waited[1] == ("b", f"{reason} Waiting up to 0.5 min.")
    assert not (tmp_path / "a" / "locks" / "queue").exists(), "the place in a's queue was given up"


def test_the_wait_for_a_gpu_ends_in_time_and_with_the_run(
    bench: GpuBench, tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.remote.choice.ASK_EVERY_S", 0.2)
    hosts = TwoHosts(tmp_path, python)
    leave_lock(hosts.lock_file("a"), expires_in_s=60)
    began = time.monotonic()
    with pytest.raises(HostTaken, match=r"or longer\. 0.0167 min were waited\."):
        hosts.ensure("references", "a", gpu_wait_s=1)
    assert 1 <= time.monotonic() - began < 5
    threading.Timer(0.5, end_everything).start()
    with pytest.raises(Cancelled, match="stage references was not started: the run is ending"):
        hosts.ensure("references", "a", gpu_wait_s=60)
    assert not (tmp_path / "a" / "locks" / "queue").exists()


@pytest.mark.parametrize("transport", ["local", "remote"])
@pytest.mark.parametrize(("local", "visible"), [({"gpu": 3, "device": "cuda"}, "3"), ({}, "7")])
def test_both_runners_show_a_stage_its_gpu_alone(
    bench: GpuBench,
    tmp_path: Path,
    python: str,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    local: dict[str, Any],
    visible: str,
) -> None:
    """Without a lock it sees what the host's own environment says."""
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    request = Request(stage="references", key="references-x", work_dir=tmp_path / "w", inputs={}, parameters={}, local=local)
    events: list[dict[str, Any]] = []
    log_path, work_dir = tmp_path / "log", PurePosixPath(tmp_path / "w")
    if transport == "local":
        host = LocalHost("h", tmp_path / "w", threads=1, slots=1, python=python)
        host.run_stage(request, log_path=log_path, deadline_s=60, on_event=events.append)
    else:
        shell = LocalShell("h")
        runner = RemoteRunner(shell, work_dir=work_dir, python=python, code=pack_code(), threads=1, slots=1, poll_s=0.05)
        runner.run(request, log_path=log_path, deadline_s=60, on_event=events.append)
    said = json.loads(events[0]["message"])
    assert (said["visible"], said["device"]) == (visible, local.get("device", "cpu"))


def test_a_gpu_with_too_little_memory_is_passed_over(bench: GpuBench) -> None:
    bench.nvidia_smi("0, 65536, 81920", "1, 3277, 20480", "2, 20480, 20480")
    with bench.locks((1, 2), min_free_gib=20).holding("a") as gpu:
        assert gpu == HeldGpu(number=2, cuda=True)
        assert {"gpu": 2, "device": "cuda"}.items() <= gpu.local.items()
        bench.leave(expires_in_s=60)
        reason = busy(bench.locks((0, 1, 5), min_free_gib=20))
    assert reason == (
        f"[h] no GPU is free: gpu 0 is held by {OTHER} {span(bench.lock_file())}; "
        "gpu 1 has 3.2 of 20 GiB free, wanted are 20; gpu 5 is not there, only 0, 1, 2."
    )
    with bench.locks((1,)).holding("without a wish") as gpu:
        assert gpu.number == 1


def test_without_nvidia_smi_the_lock_holds_and_no_device_is_named(bench: GpuBench) -> None:
    with bench.locks(min_free_gib=20).holding("a") as gpu:
        assert set(gpu.local) == {"gpu", "gpu_lock"}


def test_a_holder_is_named_so_that_people_can_find_it() -> None:
    name = os.uname().nodename
    assert this_holder("20260101-030000") == f"{name} pid {os.getpid()} run 20260101-030000"
    assert this_holder("") == f"{name} pid {os.getpid()}"


def test_hosts_check_tells_who_holds_what(tmp_path: Path) -> None:
    (tmp_path / "hosts.yaml").write_text("hosts:\n  a: {work_dir: a, gpus: [0]}\n")
    leave_lock(tmp_path / "a" / "locks" / "gpu-0", expires_in_s=60)
    (tmp_path / "a" / "locks" / "gpu-1").write_text("reserved\nby hand\n")
    report = check_hosts(read_inventory(tmp_path / "hosts.yaml", home=tmp_path / "home"))[0]
    expected = f"gpu-0 held by {OTHER} {span(tmp_path / 'a' / 'locks' / 'gpu-0')}"
    assert report.locks == [expected, "gpu-1 reserved by hand"]
    assert lock_sentence("gpu-2", "") == "gpu-2"
