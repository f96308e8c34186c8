"""Holding a finished evaluation against its gate: finds the best earlier checkpoint of each candidate in the history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_model.evaluations import Evaluation, Ground, read_result
from dflash_model.gate import Best, GateOutcome, GateRules, judge_gate
from dflash_model.history import evaluations
from dflash_model.trend import trend_of


def hold_gate(
    comparison: Path, sources: Sequence[Mapping[str, Any]], rules_given: Mapping[str, Any], *, home: Path, run_id: str
) -> GateOutcome:
    """The outcome of the rules (fields of GateRules) for the result.json in the directory `comparison`.

    `sources`: {host, path} of its drafters, in their order. `run_id` is the evaluation that is being finished.
    """
    rules = GateRules(**rules_given)
    if not rules.any:
        return GateOutcome(regressed=(), not_applied=())
    result = read_result(comparison)
    best = best_so_far(result, sources, home=home, run_id=run_id) if rules.worse_than_best is not None else {}
    return judge_gate(result, rules, best)


def best_so_far(
    result: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], *, home: Path, run_id: str
) -> dict[str, Best | None]:
    """Candidate -> the best other checkpoint of its training run, evaluated before on the same ground; None without one."""
    earlier = [one for one in evaluations(home) if one.run_id != run_id]
    found: dict[str, Best | None] = {}
    for entry, source in zip(result["drafters"], sources, strict=True):
        if entry["role"] == "candidate":
            training_run = f"{source['host']}:{PurePosixPath(source['path']).parent}"
            others = [one.without(entry["digest"]) for one in earlier]
            found[entry["name"]] = _best(others, training_run, Ground.of(result), home)
    return found


def _best(earlier: Sequence[Evaluation], training_run: str, ground: Ground, home: Path) -> Best | None:
    trend = trend_of(earlier, training_run, ground=ground)
    point = trend.best if trend is not None else None
    if point is None:
        return None
    return Best(run_id=point.run_id, name=point.drafter.name, result=read_result(home / "runs" / point.run_id))
