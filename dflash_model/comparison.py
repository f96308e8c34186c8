"""Better, worse, equal or undecided: drafters against one reference, paired by prompt on the same tokens.

The verdict is about pooled tau. A per-request mean that moves the other way is said in a sentence, never hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dflash_model.intervals import RESAMPLES, SEED, Estimate, Ratio, estimate, estimate_mean
from dflash_model.totals import Request
from dflash_model.verdict import Difference, Interval, Spread, Verdict, judge


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How intervals and verdicts are made."""

    level: float = 0.95
    """Confidence of every interval, and 1 - the error rate of the verdicts of one comparison taken together."""

    equal_within: float = 0.02
    """Share of the reference's tau that makes no difference in practice."""

    min_prompts: int = 10
    """Fewer prompts with a step give no interval and no verdict: below 10 simulated intervals were too wide to use."""

    resamples: int = RESAMPLES
    """Bootstrap resamples of the prompts."""

    seed: int = SEED
    """Of the resamples."""

    def __post_init__(self) -> None:
        """ValueError for rules out of range."""
        if not 0.5 <= self.level < 1 or self.equal_within < 0 or self.min_prompts < 2 or self.resamples < 1:
            raise ValueError(f"rules {self} out of range")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tau:
    """One drafter's tau over some requests."""

    pooled: float | None
    """Tokens per step over all steps; None without a step."""

    interval: Interval | None
    """Of `pooled`; None where the prompts are too few."""

    per_request: float | None
    """Mean of the requests' own tau."""

    per_request_interval: Interval | None
    """Of `per_request`."""

    steps: int
    """Verify steps."""

    tokens: int
    """Tokens of those steps."""

    requests: int
    """All requests."""

    requests_without_steps: int
    """Requests that no tau includes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedComparison:
    """One candidate against the reference."""

    difference: Difference | None
    """The numbers; None where not one prompt has a step under both."""

    verdict: Verdict
    """What they say."""


def tau_of(rows: Sequence[Request], *, rules: Rules) -> Tau:
    """Both taus of one drafter with their intervals."""
    with_steps = [row for row in rows if row.steps]
    pooled = per_request = None
    pooled_interval = per_request_interval = None
    if with_steps:
        ratio = _ratio(with_steps)
        taus = ratio.numerator / ratio.denominator
        pooled, per_request = ratio.value, float(taus.mean())
        if len(with_steps) >= rules.min_prompts:
            pooled_interval = estimate(ratio, resamples=rules.resamples, seed=rules.seed).interval(rules.level)
            per_request_interval = estimate_mean(taus).interval(rules.level)
    return Tau(
        pooled=pooled,
        interval=pooled_interval,
        per_request=per_request,
        per_request_interval=per_request_interval,
        steps=sum(row.steps for row in rows),
        tokens=sum(row.tokens for row in rows),
        requests=len(rows),
        requests_without_steps=len(rows) - len(with_steps),
    )


def compare(
    candidates: Mapping[str, Sequence[Request]], reference: Sequence[Request], *, reference_name: str, rules: Rules
) -> dict[str, PairedComparison]:
    """Each candidate against the reference. ValueError where the rows are not of the same prompts in the same order.

    Better or worse: Holm's step-down test of "no difference" over all candidates rejects at 1 - `rules.level`. Equal, which
    goes first: the whole interval at Bonferroni's level lies within the margin, so a difference that is certain but too
    small to matter is equal. With one candidate both read off the plain interval.
    """
    pairs = {name: _paired(rows, reference) for name, rows in candidates.items()}
    estimates = {
        name: estimate(*ratios, resamples=rules.resamples, seed=rules.seed)
        for name, ratios in pairs.items()
        if ratios is not None and len(ratios[0].numerator) >= rules.min_prompts
    }
    adjusted = holm({name: found.p_value() for name, found in estimates.items()})
    compared = {}
    for name, ratios in pairs.items():
        difference = None
        if ratios is not None:
            difference = _difference(ratios, estimates.get(name), adjusted.get(name, 1.0), family=len(estimates), rules=rules)
        verdict = judge(difference, names=(name, reference_name), min_prompts=rules.min_prompts)
        compared[name] = PairedComparison(difference=difference, verdict=verdict)
    return compared


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: reject where they are at or below the error rate."""
    adjusted: dict[str, float] = {}
    worst = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda key: (p_values[key], key))):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = worst
    return adjusted


def _ratio(rows: Sequence[Request]) -> Ratio:
    return Ratio(
        numerator=np.array([row.tokens for row in rows], dtype=np.float64),
        denominator=np.array([row.steps for row in rows], dtype=np.float64),
    )


def _paired(candidate: Sequence[Request], reference: Sequence[Request]) -> tuple[Ratio, Ratio] | None:
    """Both drafters' ratios over the prompts where both have a step; None where there is no such prompt."""
    if [row.sample_id for row in candidate] != [row.sample_id for row in reference]:
        raise ValueError("rows of different prompts, or in another order")
    pairs = [(ours, theirs) for ours, theirs in zip(candidate, reference, strict=True) if ours.steps and theirs.steps]
    if not pairs:
        return None
    return _ratio([ours for ours, _ in pairs]), _ratio([theirs for _, theirs in pairs])


def _difference(ratios: tuple[Ratio, Ratio], found: Estimate | None, p_value: float, *, family: int, rules: Rules) -> Difference:
    """The numbers of one candidate; `found` is None where the prompts are too few for an interval."""
    candidate, reference = ratios
    moved = candidate.numerator / candidate.denominator - reference.numerator / reference.denominator
    spread = None
    if found is not None:
        spread = Spread(
            interval=found.interval(rules.level),
            family_half_width=found.half_width(1 - (1 - rules.level) / family),
            per_request_interval=estimate_mean(moved).interval(rules.level),
            p_value=p_value,
            error_rate=1 - rules.level,
            candidates=family,
        )
    return Difference(
        prompts=len(moved),
        candidate_tau=candidate.value,
        reference_tau=reference.value,
        per_request=float(moved.mean()),
        equal_within=rules.equal_within * reference.value,
        spread=spread,
    )
