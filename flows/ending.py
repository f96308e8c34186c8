"""How a run ends for people: a hook for each final state of the flow that tells the webhook what came out.

Prefect calls a crash's hook in the runner's process when the run's own process died, so what the run knew is found again
by its parameters there.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dflash_model.errors import EvalError
from dflash_model.evaluations import read_result
from dflash_model.table import drafter_lines
from flows.parameters import EvaluateParameters
from tasks.notify import deliver, slack_message, webhook_url
from tasks.publish import REPORT_FILE

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.schemas.objects import FlowRun, State

log = logging.getLogger(__name__)
_directories: dict[UUID, Path] = {}


def remember(flow_run_id: UUID | str | None, directory: Path) -> None:
    """Note where a run of this process keeps its files."""
    if flow_run_id is not None:
        _directories[UUID(str(flow_run_id))] = directory


def tell_people(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """Hook of every final state: send the verdict, the numbers and the link, or what went wrong. Never raises."""
    parameters = _parameters(flow_run)
    trouble = not state.is_completed()
    if parameters is None or parameters.notify.on == "never" or (parameters.notify.on == "trouble" and not trouble):
        return
    directory = _directories.pop(flow_run.id, None)
    try:
        url = webhook_url(parameters.notify.secret_block)
        if url is None:
            return
        headline, lines = _news(flow_run.name, state, directory, link=parameters.notify.link)
    except EvalError as exc:
        log.warning("%s: nobody was told how it ended: %s", flow_run.name, exc.problem)
        return
    if deliver(url, slack_message(headline, lines)):
        log.info("%s: the webhook was told", flow_run.name)


def _parameters(flow_run: FlowRun) -> EvaluateParameters | None:
    given = (flow_run.parameters or {}).get("parameters")
    if isinstance(given, EvaluateParameters) or given is None:
        return given
    return EvaluateParameters.model_validate(given)


def _news(name: str, state: State[Any], directory: Path | None, *, link: str | None) -> tuple[str, list[str]]:
    """(headline, lines) of a run that ended in `state`."""
    message = state.message or "no reason is known"
    finished = state.is_completed() or state.name == "Regressed"
    if directory is None or not finished:
        again = [f"`dflash-eval rerun {directory.name}` goes on where it stopped."] if directory is not None else []
        return f"Evaluation {name} {(state.name or 'ended').lower()}.", [message, *again]
    result = read_result(directory)
    report = directory / REPORT_FILE if link is None else f"{link.rstrip('/')}/{directory.name}/{REPORT_FILE}"
    lines = [*drafter_lines(result), f"Report: {report}"]
    if state.is_completed():
        return str(result["headline"]), lines
    return f"Regressed: {message}", lines
