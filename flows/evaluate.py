"""The nightly evaluation as a Prefect flow.

Annotations are evaluated here, unlike elsewhere: Prefect loads this file by its path when it serves the flow, and cannot
resolve their text then.
"""

import logging
import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Failed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.variables import Variable

from dflash_model.digests import json_digest
from dflash_model.errors import ArtifactLost, EvalError, InputError, Regressed, SourceChanged
from dflash_model.stages.registry import STAGES
from dflash_model.storage import write_json
from flows.doing import FlowBook
from flows.ending import remember, tell_people
from flows.parameters import REQUEST_FILE, EvaluateParameters
from flows.pipeline import Outcome, evaluate_with
from flows.server import OWN_SERVER
from tasks.call import Account
from tasks.events import Event, tell
from tasks.gate import hold_gate
from tasks.publish import REPORT_FILE, publish
from tasks.remote.inventory import RELAY
from tasks.remote.processes import end_everything
from tasks.remote.site import default_home
from tasks.remote.transfer import artifact_path
from tasks.settings import RunPlace

log = logging.getLogger(__name__)
ATTEMPTS = 3
PLACEMENT_VARIABLE = "dflash_eval_placement"
ERROR_FILE = "error.json"
VERSIONS_OF = ("dflash-eval", "prefect", "torch", "transformers", "numpy", "scipy")


def place_of(parameters: EvaluateParameters) -> RunPlace:
    """Where this run's files are; a run id is made from time and parameters when none is given."""
    home = Path(parameters.home).expanduser().resolve() if parameters.home else default_home()
    inventory = str(Path(parameters.inventory).expanduser().resolve()) if parameters.inventory else None
    run_id = parameters.run_id or _new_run_id(parameters)
    return RunPlace(
        run_id=run_id,
        home=str(home),
        inventory=inventory,
        deadline_s=parameters.deadline_s,
        gpu_wait_s=parameters.gpu_wait_s,
    )


def _new_run_id(parameters: EvaluateParameters) -> str:
    now = datetime.now(UTC)
    return f"{now:%Y%m%d-%H%M%S}-{json_digest([parameters.model_dump(), now.isoformat()])[:6]}"


def _flow_run_name() -> str:
    """The run id where the caller chose one, so that the UI and the run's directory share a name."""
    given = flow_run.parameters["parameters"]
    run_id = given.get("run_id") if isinstance(given, dict) else given.run_id
    return run_id or f"evaluate-{datetime.now(UTC):%Y%m%d-%H%M%S}"


@flow(
    name="evaluate",
    flow_run_name=_flow_run_name,
    task_runner=ThreadPoolTaskRunner(max_workers=8),  # type: ignore[arg-type]
    persist_result=False,
    retries=0,
    on_completion=[tell_people],
    on_failure=[tell_people],
    on_crashed=[tell_people],
)
def evaluate(parameters: EvaluateParameters) -> dict[str, Any] | State[Any]:
    """Evaluate drafter checkpoints: relay, target side, replay, comparison, report, gate. Finished work is not done again.

    A broken rule of the gate ends the run in the failed state Regressed, with everything published.
    """
    started = time.time()
    place = place_of(parameters)
    remember(flow_run.id, place.directory)
    write_json(place.directory / REQUEST_FILE, parameters.model_dump(mode="json") | {"run_id": place.run_id})
    parameters = parameters.model_copy(update={"placement": parameters.placement | placement_variable()})
    place.site().avoided.clear()
    known_end = False
    try:
        book, comparison = _evaluate(place, parameters)
        known_end = True
    except EvalError as exc:
        known_end = True
        write_json(place.directory / ERROR_FILE, exc.to_json())
        raise
    finally:
        if not known_end:
            # The run itself is being ended (a signal, a cancel): nobody shall wait for stages that still run.
            end_everything()
        else:
            place.site().sweep()
        place.site().close()
    stages = [row.to_json() for row in book.account.rows]
    sources = [{"host": found.host, "path": found.path} for found in book.found]
    run = {
        "run_id": place.run_id,
        "started_at": _iso(started),
        "finished_at": _iso(time.time()),
        "stages": stages,
        "sources": sources,
        "versions": {name: version(name) for name in VERSIONS_OF} | {"python": platform.python_version()},
        "ui_url": None if OWN_SERVER in os.environ else flow_run.ui_url,
        "parameters": parameters.model_dump(mode="json"),
    }
    there = Path(artifact_path(place.site().host(RELAY), comparison.key))
    gate = hold_gate(there, sources, parameters.gate.model_dump(), home=Path(place.home), run_id=place.run_id)
    result = publish(place.run_id, str(there), run | {"gate": gate.to_json()}, place.to_json())
    if gate.regressed:
        error = Regressed(" ".join(gate.regressed), f"The report says where it was lost: {place.directory / REPORT_FILE}.")
        return Failed(name="Regressed", message=error.problem, data=error)
    return {"run_id": place.run_id, "directory": str(place.directory), "stages": stages, "result": result}


def _evaluate(place: RunPlace, parameters: EvaluateParameters) -> tuple[FlowBook, Outcome]:
    """All stages; again, at most twice, where an artifact was lost with its host or a checkpoint was overwritten: only what is missing runs."""
    redo = redone_stages(parameters.redo_from)
    account = Account(place)
    for attempt in range(ATTEMPTS):
        book = FlowBook(account, redo=redo if attempt == 0 else ())
        try:
            comparison = evaluate_with(book, parameters)
        except (ArtifactLost, SourceChanged) as exc:
            if attempt == ATTEMPTS - 1:
                raise
            log.warning("going through the stages again: %s", exc.problem)
            tell(Event(what="note", stage="evaluate", host="relay", message=f"{exc.problem} Going through the stages again."))
            continue
        assert comparison is not None
        return book, comparison
    raise AssertionError


def placement_variable() -> dict[str, list[str]]:
    """The Prefect Variable `dflash_eval_placement` ({stage: host or [hosts]}): what an operator says now wins over parameters."""
    value = Variable.get(PLACEMENT_VARIABLE, default=None)
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(hosts, str | list) for hosts in value.values()):
        raise InputError(
            f"The Prefect Variable {PLACEMENT_VARIABLE} is {value!r}.",
            'Set it to JSON like {"hidden-states": "gpu-b"}, or delete it.',
        )
    return {stage: [hosts] if isinstance(hosts, str) else [str(name) for name in hosts] for stage, hosts in value.items()}


def redone_stages(first: str | None) -> tuple[str, ...]:
    """`first` and every stage after it. Raises InputError for an unknown one."""
    if first is None:
        return ()
    names = list(STAGES)
    if first not in names:
        raise InputError(f"There is no stage {first!r} to start from.", f"Stages: {', '.join(names)}.")
    return tuple(names[names.index(first) :])


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
