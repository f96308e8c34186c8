"""Evaluating each checkpoint as training saves it: a loop on the terminal, and a Prefect flow that looks once.

Annotations are evaluated here, unlike elsewhere: Prefect loads this file by its path when it serves the flow, and cannot
resolve their text then.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from prefect import flow

from dflash_model.digests import json_digest
from dflash_model.errors import CheckpointError, ConfigError, HostError, InputError, Regressed, StageError
from flows.evaluate import evaluate, place_of
from flows.parameters import DrafterSource, EvaluateParameters
from tasks.remote.drafters import SETTLE_S
from tasks.remote.host import literal_pattern
from tasks.remote.watching import EVALUATED, REFUSED, Sighting, WatchBook, new_checkpoints

log = logging.getLogger(__name__)

Evaluate = Callable[[EvaluateParameters], dict[str, Any]]
Say = Callable[[str], None]
PASSING = (HostError, StageError)
"""What the next look may find mended; everything else ends the watch."""


def book_of(parameters: EvaluateParameters) -> WatchBook:
    """The book of a watch with these parameters: other prompts or another target are another watch."""
    place = place_of(parameters)
    deciding = parameters.model_dump(mode="json", exclude={"home", "run_id", "redo_from", "placement", "failover"})
    return WatchBook(Path(place.home) / "watches" / f"{json_digest(deciding)[:24]}.json")


def look_once(parameters: EvaluateParameters, *, evaluate: Evaluate, say: Say, settle_s: float = SETTLE_S) -> list[str]:
    """Evaluate every new complete checkpoint of the one candidate, in order; returns their names.

    A checkpoint that cannot be read for what it claims is noted as refused, one that is worse than the gate allows as
    evaluated; the next one is taken. Raises InputError
    for parameters with several candidates, and whatever else an evaluation raises; what was done by then stays noted.
    """
    if len(parameters.candidates) != 1:
        raise InputError(f"A watch follows one candidate, not {len(parameters.candidates)}.", "Give one path or glob.")
    (candidate,) = parameters.candidates
    site = place_of(parameters).site()
    name = candidate.host or site.inventory.with_role("train")[0].name
    book, done = book_of(parameters), []
    try:
        sightings = new_checkpoints(site.host(name), candidate.path, known=book.marks, settle_s=settle_s)
    finally:
        site.close()
    for sighting in sightings:
        if book.knows(sighting.drafter):
            book.note(sighting, outcome=EVALUATED, detail="the same content as an earlier one")
            continue
        say(f"{sighting.drafter.name}: new on {name}")
        try:
            outcome = evaluate(_parameters_of(parameters, sighting))
        except (CheckpointError, ConfigError) as exc:
            book.note(sighting, outcome=REFUSED, detail=exc.problem)
            say(f"{sighting.drafter.name}: refused. {exc.problem}")
            continue
        except Regressed as exc:
            book.note(sighting, outcome=EVALUATED, detail=exc.problem)
            say(f"{sighting.drafter.name}: {exc.problem}")
        else:
            book.note(sighting, outcome=EVALUATED, detail=str(outcome["run_id"]))
        done.append(sighting.drafter.name)
    return done


def _parameters_of(parameters: EvaluateParameters, sighting: Sighting) -> EvaluateParameters:
    found = sighting.drafter
    source = DrafterSource(host=found.host, path=literal_pattern(PurePosixPath(found.path)), name=found.name)
    return parameters.model_copy(update={"candidates": [source], "run_id": None})


def keep_looking(
    parameters: EvaluateParameters, *, evaluate: Evaluate, say: Say, every_s: float, looks: int | None = None
) -> None:
    """`look_once` again and again, `every_s` apart; what is passing (a host that is down, a stage that failed) is said and
    tried again. `looks`: end after that many; None: until interrupted."""
    count = 0
    while looks is None or count < looks:
        if count:
            time.sleep(every_s)
        count += 1
        try:
            look_once(parameters, evaluate=evaluate, say=say)
        except PASSING as exc:
            say(f"{exc.problem} Tried again at the next look.")


@flow(name="watch", persist_result=False)
def watch(parameters: EvaluateParameters) -> list[str]:
    """Evaluate every new complete checkpoint of a training run, then end; schedule it every few minutes."""
    return look_once(parameters, evaluate=_as_subflow, say=log.info)


def _as_subflow(parameters: EvaluateParameters) -> dict[str, Any]:
    outcome: Any = evaluate(parameters)
    return dict(outcome)
