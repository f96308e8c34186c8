"""Nights that Prefect starts, as from its UI: cancelled in each stage, retried on another host after the Variable was changed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from lab import Lab

from flows.evaluate import PLACEMENT_VARIABLE
from flows.parameters import EvaluateParameters

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("prefect_api")]
Living = Callable[[Path], list[str]]


@contextmanager
def served(night: EvaluateParameters, tmp_path: Path) -> Iterator[Callable[..., UUID]]:
    """`dflash-eval serve` on the session's Prefect server; yields a function that starts a run, with changes, and gives its id."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    (tmp_path / "night.json").write_text(night.model_dump_json())
    program = str(Path(sys.executable).parent / "dflash-eval")
    command = [program, "serve", str(tmp_path / "night.json"), "--name", tmp_path.name, "--home", str(night.home)]
    env = os.environ | {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    with (tmp_path / "serve.log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True, cwd=tmp_path)

    def start(**changes: Any) -> UUID:
        with get_client(sync_client=True) as client:
            until = time.monotonic() + 60
            while True:
                try:
                    deployment = client.read_deployment_by_name(f"evaluate/{tmp_path.name}")
                    break
                except Exception as exc:  # it is registered a few seconds after serve has started
                    if time.monotonic() > until:
                        raise AssertionError((tmp_path / "serve.log").read_text()) from exc
                    time.sleep(0.5)
            chosen = {"parameters": night.model_copy(update=changes).model_dump(mode="json")}
            return client.create_flow_run_from_deployment(deployment.id, parameters=chosen).id

    try:
        yield start
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def state_of(run_id: UUID) -> Any:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        return client.read_flow_run(run_id).state


def wait_for(condition: Callable[[], Any], *, seconds: float, why: Callable[[], str] = lambda: "") -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(why())


def set_state(run_id: UUID, state: Any) -> None:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run_id, state, force=True)


def runs_stage(lab: Lab, stage: str) -> bool:
    return any(stage in line for name in ("eval", "gpu-a", "gpu-b") for line in lab.processes(name).values())


def test_a_cancel_from_the_api_in_each_stage_ends_its_program(
    lab: Lab, night: EvaluateParameters, tmp_path: Path, living: Living
) -> None:
    """Last stage first, so that each finds its inputs done. The stages that take no second cannot be met by a cancel."""
    from prefect.states import Cancelling

    stages = ("replay", "hidden-states", "references", "target-tables")
    with served(night, tmp_path) as start:
        done = start()
        wait_for(lambda: state_of(done).is_final(), seconds=180, why=lambda: (tmp_path / "serve.log").read_text())
        assert state_of(done).is_completed()
        for stage in stages:
            run_id = start(redo_from=stage)
            wait_for(lambda stage=stage: runs_stage(lab, stage), seconds=120, why=lambda: (tmp_path / "serve.log").read_text())
            set_state(run_id, Cancelling())
            wait_for(lambda run_id=run_id: state_of(run_id).is_final(), seconds=90, why=lambda r=run_id: str(state_of(r)))
            assert state_of(run_id).name == "Cancelled"
            wait_for(lambda: not any(runs_stage(lab, name) for name in stages), seconds=15)
    wait_for(lambda: living(tmp_path) == [], seconds=20, why=lambda: str(living(tmp_path)))


def test_a_retry_from_the_api_goes_on_elsewhere_after_the_variable_was_changed(
    lab: Lab, night: EvaluateParameters, tmp_path: Path
) -> None:
    from prefect.states import AwaitingRetry
    from prefect.variables import Variable

    night = night.model_copy(update={"failover": False})
    try:
        with served(night, tmp_path) as start:
            run_id = start()
            wait_for(lambda: runs_stage(lab, "hidden-states"), seconds=120, why=lambda: (tmp_path / "serve.log").read_text())
            killer = threading.Thread(target=lab.kill, args=("gpu-a",))
            killer.start()
            killer.join()
            wait_for(lambda: state_of(run_id).is_failed(), seconds=120, why=lambda: str(state_of(run_id)))
            stages = ("identify-target", "hidden-states", "target-tables", "references")
            Variable.set(PLACEMENT_VARIABLE, dict.fromkeys(stages, "gpu-b"), overwrite=True)
            set_state(run_id, AwaitingRetry())
            wait_for(lambda: state_of(run_id).is_completed(), seconds=150, why=lambda: str(state_of(run_id)))
    finally:
        Variable.unset(PLACEMENT_VARIABLE)
        lab.restart("gpu-a")
        # What a power cut left in a run's directory is swept by a later run, a day on; not waited for here.
        shutil.rmtree(lab.disk("gpu-a") / "work" / "runs", ignore_errors=True)
    run = json.loads((Path(str(night.home)) / "runs" / "latest" / "run.json").read_text())
    rows = {row["name"]: (row["state"], row["host"]) for row in run["stages"]}
    assert rows["hidden states"] == ("ran", "gpu-b")
    assert rows["references"][0] == rows["extract reference"][0] == rows["relay step-00110"][0] == "cached"
