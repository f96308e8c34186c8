"""What several test files need: a host whose stage programs do as told, and Prefect kept out of the user's home."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Workers side by side share the cores. Before anything imports torch.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import pytest
from lab import Lab, why_impossible

from flows.parameters import EvaluateParameters
from tasks.remote.processes import allow_children
from tests.lab_hosts import LabHosts
from tests.lab_night import FinishedNight, finish, furnish, make_checkpoint, parameters_in

ROOT = Path(__file__).resolve().parent.parent


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
    with prefect_test_harness(server_startup_timeout=600), temporary_settings({PREFECT_LOCAL_STORAGE_PATH: storage}):
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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw training file; only read."""
    return make_checkpoint(tmp_path_factory.mktemp("training") / "step-00110.pt")


@pytest.fixture
def night(lab: Lab, lab_hosts: LabHosts, checkpoint: Path, tmp_path: Path) -> Iterator[EvaluateParameters]:
    """Each host has what it has in real life; the relay has the prompts and an inventory with short times."""
    furnish(lab, checkpoint)
    before = lab.files("train")
    yield parameters_in(tmp_path, lab)
    assert lab.files("train") == before


@pytest.fixture(scope="session")
def finished_night(lab: Lab, prefect_api: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedNight:
    """One whole night, run before the first test that begins with what it left. The lab is empty again afterwards."""
    try:
        return finish(lab, tmp_path_factory.mktemp("finished"), checkpoint)
    finally:
        LabHosts(lab).expect_clean()


@pytest.fixture
def night_before(
    lab: Lab, finished_night: FinishedNight, night: EvaluateParameters
) -> Callable[[str | None], EvaluateParameters]:
    """A night that is done up to a stage (None: all of it); the stage and all after it are still to do."""
    return lambda stage: finished_night.restore(lab, night, before=stage)
