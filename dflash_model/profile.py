"""speculation_profile.json: acceptance of one drafter, for simulators and serving tools that would otherwise guess it.

Follows schema version 1.0 as proposed in NVIDIA Model-Optimizer's pull requests 2247 (schema), 2313, 2315 and 2316, read in
September 2026 while they were open; only this file knows the schema. A length counts the bonus token, so it is at least 1,
and entry i of a rate speaks of length i + 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from dflash_model.errors import InputError

PROFILE_VERSION = "1.0"
_TOLERANCE = 0.02


def speculation_profile(
    result: Mapping[str, Any], drafter_name: str, *, conditions: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The profile of one drafter of a result. `conditions` (dataset, osl, ..) go into measurement_conditions.

    Rates come from the histogram, as steps were counted, so that 1 + sum of marginal rates is the mean: a step that the tail
    rule cut counts as short, unlike in the result's survival. A conditional rate that no step reached is 0, as the schema
    wants. Raises InputError where the drafter is unknown or has no verify step.
    """
    drafter = next((one for one in result["drafters"] if one["name"] == drafter_name), None)
    if drafter is None:
        names = ", ".join(one["name"] for one in result["drafters"])
        raise InputError(f"The result has no drafter {drafter_name}.", f"It has {names}.")
    histogram = {int(length): int(steps) for length, steps in drafter["histogram"].items()}
    if not sum(histogram.values()):
        raise InputError(
            f"{drafter_name} has no verify step, so there is no acceptance to tell.", "Evaluate it on longer answers."
        )
    drafted = drafter["spec"]["drafted_tokens"]
    survival = _survival(histogram, drafted)
    mean = sum(length * steps for length, steps in histogram.items()) / sum(histogram.values())
    return {
        "schema_version": PROFILE_VERSION,
        "measured": True,
        "method": drafter["spec"]["family"],
        "draft_checkpoint": {"name": drafter_name, "digest": drafter["digest"], "step": drafter["step"]},
        "target_model": {key: result["target"][key] for key in ("name", "digest") if key in result["target"]},
        "num_speculative_tokens": drafted,
        "block_size": drafter["spec"]["block_size"],
        "max_supported_k": drafted,
        "verification_method": "longest_prefix",
        "conditional_accept_rates": [_ratio(now, before) for before, now in pairwise(survival)],
        "marginal_accept_rates": [round(share, 6) for share in survival[1:]],
        "mean_accept_length": round(mean, 6),
        "mean_accept_length_per_request": drafter["tau"]["per_request"],
        "accept_length_model": "measured_per_k",
        "accept_length_by_k": {str(drafted): round(mean, 6)},
        "acceptance_length_histogram": {str(length): histogram[length] for length in sorted(histogram)},
        "per_category": {name: {"mean_accept_length": cell["tau"]} for name, cell in drafter["categories"].items()},
        "measurement_conditions": {
            "num_samples": drafter["tau"]["requests"] - drafter["tau"]["requests_without_steps"],
            "bonus_token": "counted",
            "tail": result["tail"],
            "validation": "replay over the target's own greedy tokens",
        }
        | dict(conditions or {}),
        "validation": _validation(mean, survival[1:]),
    }


def _survival(histogram: Mapping[int, int], drafted: int) -> list[float]:
    """[P(length >= 1), .., P(length >= drafted + 1)]; lengths that never occurred are summed over like any other."""
    total = sum(histogram.values())
    return [sum(steps for length, steps in histogram.items() if length >= least) / total for least in range(1, drafted + 2)]


def _ratio(now: float, before: float) -> float:
    return round(now / before, 6) if before else 0.0


def _validation(mean: float, marginal: list[float]) -> dict[str, Any]:
    """The schema's two self-checks: the rates give the mean (they do not if K is understated), and never rise."""
    implied = 1 + sum(marginal)
    rises = [i for i in range(1, len(marginal)) if marginal[i] > marginal[i - 1]]
    return {
        "mean_consistency": {
            "implied_mean_accept_length": round(implied, 6),
            "reported_mean_accept_length": round(mean, 6),
            "abs_delta": round(abs(implied - mean), 6),
            "tolerance": _TOLERANCE,
            "passed": abs(implied - mean) <= _TOLERANCE,
        },
        "marginal_monotonicity": {
            "passed": not rises,
            "violations": [{"position": i, "value": marginal[i], "previous": marginal[i - 1]} for i in rises],
        },
    }
