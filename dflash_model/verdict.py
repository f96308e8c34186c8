"""From a difference and its interval to one word, one sentence and, if undecided, how many prompts more.

Equal is asked first: a difference that is certain but smaller than the margin is equal, and the sentence says both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

BETTER = "better"
WORSE = "worse"
EQUAL = "equal"
UNDECIDED = "undecided"
NO_VERDICT = "no verdict"
VERDICTS = (BETTER, WORSE, EQUAL, UNDECIDED, NO_VERDICT)

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How sure a difference is."""

    interval: Interval
    """Of the pooled difference, for this candidate alone, at the comparison's confidence."""

    family_half_width: float
    """Half of the interval at Bonferroni's level for all candidates: what "equal" is judged by."""

    per_request_interval: Interval
    """Of the per-request difference."""

    p_value: float
    """Two-sided, of "no pooled difference", after Holm's correction for all candidates."""

    error_rate: float
    """p at or below this means better or worse."""

    candidates: int
    """How many candidates were corrected for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One candidate minus the reference, over the prompts where both have a step."""

    prompts: int
    """Pairs behind every number here, at least 1."""

    candidate_tau: float
    """Pooled, over the pairs."""

    reference_tau: float
    """Pooled, over the pairs."""

    per_request: float
    """Mean over prompts of the difference of the two requests' tau."""

    equal_within: float
    """Largest difference, in tokens per step, that makes no difference in practice."""

    spread: Spread | None
    """None where the prompts are too few for an interval."""

    @property
    def value(self) -> float:
        """Difference of the pooled taus, in tokens per step."""
        return self.candidate_tau - self.reference_tau

    @property
    def relative(self) -> float:
        """`value` over the reference's tau (a tau is at least 1)."""
        return self.value / self.reference_tau

    @property
    def sign_disagreement(self) -> bool:
        """Whether pooled and per-request differences point in opposite directions."""
        return self.value * self.per_request < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The judgement of one candidate."""

    word: str
    """One of VERDICTS."""

    further_prompts: int | None
    """If undecided: how many more prompts like these would decide, were the difference what it seems. Else None."""

    sentence: str
    """The verdict in words, with its numbers."""


def judge(difference: Difference | None, *, names: tuple[str, str], min_prompts: int) -> Verdict:
    """The verdict on `names` (candidate, reference); `difference` None means that not one prompt has a step under both."""
    if difference is None or difference.spread is None:
        return Verdict(word=NO_VERDICT, further_prompts=None, sentence=_no_verdict(difference, names[0], min_prompts))
    spread = difference.spread
    word = _word(difference, spread)
    further = _further_prompts(difference, spread) if word == UNDECIDED else None
    claim = {
        BETTER: "{} is better than {}",
        WORSE: "{} is worse than {}",
        EQUAL: f"{{}} equals {{}} within {100 * difference.equal_within / difference.reference_tau:.2g}%",
        UNDECIDED: "{} cannot be told from {}",
    }[word].format(*names)
    low, high = spread.interval
    numbers = (
        f"pooled tau {difference.candidate_tau:.2f} against {difference.reference_tau:.2f}, "
        f"{difference.value:+.2f} [{low:+.2f}, {high:+.2f}] or {100 * difference.relative:+.1f}% on {difference.prompts} prompts"
    )
    remarks = _remarks(difference, spread, word, further)
    return Verdict(word=word, further_prompts=further, sentence=" ".join([f"{claim}: {numbers}.", *remarks]))


def _word(difference: Difference, spread: Spread) -> str:
    if abs(difference.value) + spread.family_half_width <= difference.equal_within:
        return EQUAL
    if spread.p_value <= spread.error_rate:
        return BETTER if difference.value > 0 else WORSE
    return UNDECIDED


def _further_prompts(difference: Difference, spread: Spread) -> int | None:
    """The interval narrows with the root of the prompts: until it leaves 0 out, or until it fits into the margin."""
    size = abs(difference.value)
    room = max(size, difference.equal_within - size)
    if room == 0:
        return None
    return max(1, math.ceil(difference.prompts * ((spread.family_half_width / room) ** 2 - 1) - 1e-6))


def _no_verdict(difference: Difference | None, candidate: str, min_prompts: int) -> str:
    prompts = difference.prompts if difference is not None else 0
    plural = "s have" if prompts != 1 else " has"
    so_far = f" So far: {difference.value:+.2f} in pooled tau." if difference is not None else ""
    return f"No verdict on {candidate}: {prompts} prompt{plural} a verify step, and an interval needs {min_prompts}.{so_far}"


def _remarks(difference: Difference, spread: Spread, word: str, further: int | None) -> list[str]:
    remarks = []
    apart_alone = spread.interval[0] > 0 or spread.interval[1] < 0
    if word == EQUAL and apart_alone:
        remarks.append("There is a difference, but it is too small to matter.")
    if word == UNDECIDED and apart_alone:
        remarks.append(
            f"Its own interval leaves 0 out, but Holm's correction for {spread.candidates} candidates "
            f"gives p = {spread.p_value:.2g}."
        )
    if further is not None:
        remarks.append(f"About {further} further prompt{'s' if further != 1 else ''} like these would decide.")
    if difference.sign_disagreement:
        remarks.append(
            f"The mean over requests points the other way ({difference.per_request:+.2f}): "
            "requests with many steps and requests with few moved apart, so read tau by category."
        )
    return remarks
