"""What several test files need: a host whose stage programs do as told, and Prefect kept out of the user's home."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Workers side by side share the cores. Before anything imports torch.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import pytest
import yaml
from lab import Lab, why_impossible

from flows.parameters import DrafterSource, EvaluateParameters, References, TargetSource
from tasks.remote.processes import allow_children
from tests.lab_hosts import LabHosts

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "deployments" / "demo"
PROMPTS = 4
TIMINGS = {"lease_s": 8, "grace_s": 6, "silence_s": 3}


@pytest.fixture(autouse=True)
def _children_allowed() -> Iterator[None]:
    allow_children()
    yield
    allow_children()


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter in which the stage `replay` does what its parameter `do` says."""
    path = tmp_path_factory.mktemp("bin") / "python"
    script = ROOT / "tests" / "fake_stage_interpreter.py"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "{script}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def living() -> Callable[[Path], list[str]]:
    """Command lines of living processes (zombies and ourselves excepted) that work in a directory or below it."""

    def look(directory: Path) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                inside = (process / "cwd").readlink().is_relative_to(directory)
                if inside and process.name != str(os.getpid()) and "\nState:\tZ" not in (process / "status").read_text():
                    found.append((process / "cmdline").read_text())
            except OSError:
                continue
        return found

    return look


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Prefect server and result store for the session, below a temporary directory."""
    from prefect.settings import PREFECT_LOCAL_STORAGE_PATH, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    storage = tmp_path_factory.mktemp("prefect-results")
    with prefect_test_harness(server_startup_timeout=180), temporary_settings({PREFECT_LOCAL_STORAGE_PATH: storage}):
        yield


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Hosts train, eval, gpu-a and gpu-b, up for the whole session. Skips where this machine cannot have them."""
    reason = why_impossible()
    if reason is not None:
        if os.environ.get("DFLASH_LAB_REQUIRED") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    made = Lab(tmp_path_factory.mktemp("lab"))
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def lab_hosts(lab: Lab) -> Iterator[LabHosts]:
    """Opens the lab's hosts for one test; afterwards nothing of it may be left on any of them."""
    hosts = LabHosts(lab)
    yield hosts
    hosts.close()
    hosts.expect_clean()


@pytest.fixture
def night(lab: Lab, lab_hosts: LabHosts, tmp_path: Path) -> Iterator[EvaluateParameters]:
    """Each host has what it has in real life; the relay has the prompts and an inventory with short times."""
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    checkpoint = lab.disk("train") / "work" / "checkpoints" / "step-00110.pt"
    maker = [
        sys.executable,
        str(DEMO / "make_checkpoints.py"),
        str(DEMO / "drafters" / "step-00110"),
        str(checkpoint),
        "--step",
        "110",
    ]
    subprocess.run(maker, check=True)
    for gpu in ("gpu-a", "gpu-b"):
        shutil.copytree(DEMO / "target", lab.disk(gpu) / "work" / "models" / "target")
    shutil.copytree(DEMO / "drafters" / "step-00220", lab.disk("eval") / "work" / "models" / "reference")
    before = lab.files("train")
    inventory = yaml.safe_load(lab.hosts_file.read_text())
    for name, entry in inventory["hosts"].items():
        entry |= {"key": str(lab.key), "known_hosts": str(lab.known_hosts)} | TIMINGS
        entry["threads"] = 1 if name != "train" else entry.get("threads", 1)
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(inventory, sort_keys=False))
    yield EvaluateParameters(
        home=str(tmp_path / "home"),
        inventory=str(tmp_path / "hosts.yaml"),
        candidates=[DrafterSource(host="train", path=str(lab.work / "checkpoints" / "step-*.pt"))],
        reference=DrafterSource(host="eval", path=str(lab.work / "models" / "reference")),
        target=TargetSource(path=str(lab.work / "models" / "target")),
        prompts=str(tmp_path / "prompts.jsonl"),
        references=References(max_new_tokens=48),
        deadline_s=120,
    )
    assert lab.files("train") == before
