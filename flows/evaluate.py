"""The nightly evaluation as a Prefect flow."""

from __future__ import annotations

import logging
import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from dflash_model.digests import json_digest
from dflash_model.errors import EvalError
from dflash_model.storage import write_json
from flows.doing import FlowBook
from flows.parameters import EvaluateParameters
from flows.pipeline import evaluate_with
from flows.server import OWN_SERVER
from tasks.publish import publish
from tasks.remote.inventory import RELAY
from tasks.remote.site import default_home
from tasks.remote.transfer import artifact_path
from tasks.settings import RunPlace

log = logging.getLogger(__name__)
REQUEST_FILE, ERROR_FILE = "request.json", "error.json"
VERSIONS_OF = ("dflash-eval", "prefect", "torch", "transformers", "numpy", "scipy")


def place_of(parameters: EvaluateParameters) -> RunPlace:
    """Where this run's files are; a run id is made from time and parameters when none is given."""
    home = Path(parameters.home).expanduser().resolve() if parameters.home else default_home()
    inventory = str(Path(parameters.inventory).expanduser().resolve()) if parameters.inventory else None
    run_id = parameters.run_id or _new_run_id(parameters)
    return RunPlace(run_id=run_id, home=str(home), inventory=inventory, deadline_s=parameters.deadline_s)


def _new_run_id(parameters: EvaluateParameters) -> str:
    now = datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M%S}-{json_digest([parameters.model_dump(), now.isoformat()])[:6]}"


def _flow_run_name() -> str:
    """The run id where the caller chose one, so that the UI and the run's directory share a name."""
    given = flow_run.parameters["parameters"]
    run_id = given.get("run_id") if isinstance(given, dict) else given.run_id
    return run_id or f"evaluate-{datetime.now(UTC):%Y%m%d-%H%M%S}"


@flow(name="evaluate", flow_run_name=_flow_run_name, task_runner=ThreadPoolTaskRunner(max_workers=8), persist_result=False)  # type: ignore[arg-type]
def evaluate(parameters: EvaluateParameters) -> dict[str, Any]:
    """Evaluate drafter checkpoints: relay, target side, replay, comparison, report. Finished work is not done again."""
    started = time.time()
    place = place_of(parameters)
    write_json(place.directory / REQUEST_FILE, parameters.model_dump(mode="json") | {"run_id": place.run_id})
    book = FlowBook(place)
    try:
        comparison = evaluate_with(book, parameters)
    except EvalError as exc:
        write_json(place.directory / ERROR_FILE, exc.to_json())
        raise
    assert comparison is not None
    stages = [{"name": row.name, "host": row.host, "state": row.state, "seconds": row.seconds} for row in book.account.rows]
    run = {
        "run_id": place.run_id,
        "started_at": _iso(started),
        "finished_at": _iso(time.time()),
        "stages": stages,
        "versions": {name: version(name) for name in VERSIONS_OF} | {"python": platform.python_version()},
        "ui_url": None if OWN_SERVER in os.environ else flow_run.ui_url,
        "parameters": parameters.model_dump(mode="json"),
    }
    there = artifact_path(place.site().host(RELAY), comparison.key)
    result = publish(place.run_id, str(there), run, place.to_json())
    return {"run_id": place.run_id, "directory": str(place.directory), "stages": stages, "result": result}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
