"""Attribution: how much of a candidate's gap to its reference is lost or won at each slot and in each category.

Both splits are exact: the parts add up to the whole, whatever the order in which they are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dflash_model.metrics import RequestRow
from dflash_model.slots import SlotRates

NO_CATEGORY = "without category"
MOST_OF_IT = 2 / 3
_NOTHING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a gap."""

    name: str
    """Slot number or category."""

    tokens: float
    """Tokens per step lost (negative) or won there."""

    share: float | None
    """Of the whole gap; parts against its direction are negative. None where there is no gap."""


def slot_parts(candidate: Sequence[SlotRates], reference: Sequence[SlotRates]) -> list[Part]:
    """The gap in 1 + sum of survival, slot by slot.

    A loss at slot i costs what would have followed. With rates c (candidate) and r (reference), slot i's part is
    (c_i - r_i) times the chance to get there times the tokens that then follow, itself included: the mean of the chance
    under the candidate with what follows under the reference, and the other way round. Taking the slots over one by one, from
    the first or from the last, gives those two; either adds up to the gap, so their mean does. A rate that one drafter never
    showed counts as the other's, and a slot that one does not have as refused.
    """
    ours, theirs = _rates(candidate, reference)
    tokens = [
        (c - r) * (_product(ours[:i]) * _following(theirs[i + 1 :]) + _product(theirs[:i]) * _following(ours[i + 1 :])) / 2
        for i, (c, r) in enumerate(zip(ours, theirs, strict=True))
    ]
    return _parts({str(slot): value for slot, value in enumerate(tokens, start=1)})


def category_parts(candidate: Iterable[RequestRow], reference: Iterable[RequestRow]) -> list[Part]:
    """The gap in pooled tau, category by category; [] where either has no step. Rows of the same prompts.

    tau is tokens over steps, T / S, so the gap is (change of T - mean tau * change of S) / mean S, which is exact, and both
    changes are sums over categories.
    """
    ours, theirs = _totals(candidate), _totals(reference)
    our_tokens, our_steps = _sum(ours)
    their_tokens, their_steps = _sum(theirs)
    if not our_steps or not their_steps:
        return []
    tau, steps = (our_tokens / our_steps + their_tokens / their_steps) / 2, (our_steps + their_steps) / 2
    parts = {}
    for name in sorted(ours.keys() | theirs.keys(), key=lambda one: (one == NO_CATEGORY, one)):
        (tokens, taken), (base_tokens, base_taken) = ours.get(name, (0, 0)), theirs.get(name, (0, 0))
        parts[name] = (tokens - base_tokens - tau * (taken - base_taken)) / steps
    return _parts(parts)


def where_most(slots: Sequence[Part]) -> tuple[int, int, float] | None:
    """(first slot, last slot, share) of the shortest run of slots that holds MOST_OF_IT of the gap; the largest share among equals.

    None where there is no gap.
    """
    shares = [part.share for part in slots]
    known = [share for share in shares if share is not None]
    if not known or len(known) != len(shares):
        return None
    for length in range(1, len(known) + 1):
        runs = [(sum(known[first : first + length]), -first) for first in range(len(known) - length + 1)]
        share, first = max(runs)
        if share >= MOST_OF_IT:
            return 1 - first, length - first, share
    return None


def attribution_sentence(slots: Sequence[Part], categories: Sequence[Part]) -> str:
    """ "71% of the loss at slots 1-2; 54% in code (-0.31)." Empty where there is no gap."""
    most = where_most(slots)
    if most is None:
        return ""
    total = sum(part.tokens for part in slots)
    first, last, share = most
    word = "loss" if total < 0 else "gain"
    where = f"slot {first}" if first == last else f"slots {first}-{last}"
    sentence = f"{share:.0%} of the {word} at {where}"
    along = [part for part in categories if part.tokens * total > 0 and part.share is not None]
    if len(categories) > 1 and along:
        largest = max(along, key=lambda part: abs(part.tokens))
        sentence += f"; {largest.share:.0%} in {largest.name} ({largest.tokens:+.2f})"
    return f"{sentence}."


def _parts(tokens: Mapping[str, float]) -> list[Part]:
    total = sum(tokens.values())
    return [
        Part(name=name, tokens=value, share=value / total if abs(total) > _NOTHING else None) for name, value in tokens.items()
    ]


def _rates(candidate: Sequence[SlotRates], reference: Sequence[SlotRates]) -> tuple[list[float], list[float]]:
    """Conditional rates of both, as long as the longer; cut at the first slot that neither knows."""
    ours: list[float] = []
    theirs: list[float] = []
    for index in range(max(len(candidate), len(reference))):
        one = candidate[index].conditional if index < len(candidate) else 0.0
        other = reference[index].conditional if index < len(reference) else 0.0
        if one is None and other is None:
            break
        ours.append(one if one is not None else other or 0.0)
        theirs.append(other if other is not None else one or 0.0)
    return ours, theirs


def _product(rates: Sequence[float]) -> float:
    product = 1.0
    for rate in rates:
        product *= rate
    return product


def _following(rates: Sequence[float]) -> float:
    """Tokens of an accepted slot and all that follow it: 1 + sum of survival from there."""
    tokens, survival = 1.0, 1.0
    for rate in rates:
        survival *= rate
        tokens += survival
    return tokens


def _totals(rows: Iterable[RequestRow]) -> dict[str, tuple[int, int]]:
    """Category -> (tokens, steps)."""
    totals: dict[str, tuple[int, int]] = {}
    for row in rows:
        name = row.category if row.category is not None else NO_CATEGORY
        tokens, steps = totals.get(name, (0, 0))
        totals[name] = (tokens + row.tokens, steps + row.steps)
    return totals


def _sum(totals: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    return sum(tokens for tokens, _ in totals.values()), sum(steps for _, steps in totals.values())
