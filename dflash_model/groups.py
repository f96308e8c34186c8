"""Where a difference sits: the same paired comparison within each category, length bucket, language or mode of the prompts.

Groups are for finding, not for judging: their intervals are each their own, with no correction for how many there are, so one
group in twenty leaves 0 out by chance. The verdict stays with all prompts together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash_model.comparison import Rules, compare
from dflash_model.totals import Request
from dflash_model.verdict import Interval

LENGTH = "length"
LABELS = ("language", "mode")
"""Keys of a prompt's line that make groups beside `category`."""
_LENGTHS = (64, 256, 1024)
Labels = Mapping[str, Mapping[str, str]]
"""Axis ("category", "length", "language", "mode") -> prompt's id -> group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupDifference:
    """One candidate minus the reference over one group of prompts."""

    axis: str
    """"category", "length", "language" or "mode"."""

    group: str
    """Its name on that axis."""

    prompts: int
    """Pairs with a step under both."""

    difference: float
    """Of the pooled taus, in tokens per step."""

    interval: Interval | None
    """Of `difference`, for this group alone; None where the prompts are too few."""


def length_bucket(completion_tokens: int) -> str:
    """Bucket of a completion's length in tokens: "up to 64 tokens", "65 to 256 tokens", .., "over 1024 tokens"."""
    low = 0
    for high in _LENGTHS:
        if completion_tokens <= high:
            return f"{low + 1} to {high} tokens" if low else f"up to {high} tokens"
        low = high
    return f"over {low} tokens"


def group_differences(
    candidate: Sequence[Request], reference: Sequence[Request], labels: Labels, *, rules: Rules
) -> list[GroupDifference]:
    """Every group of every axis that splits the prompts (two groups or more), in the order of the axes, groups by name.

    Rows of the same prompts in the same order (ValueError else); a prompt without a label on an axis is in no group of it.
    """
    found = []
    for axis, group_of in labels.items():
        groups = sorted({group_of[row.sample_id] for row in candidate if row.sample_id in group_of}, key=_by_size)
        for group in groups if len(groups) > 1 else ():
            ours, theirs = ([row for row in rows if group_of.get(row.sample_id) == group] for rows in (candidate, reference))
            difference = compare({"candidate": ours}, theirs, reference_name="reference", rules=rules)["candidate"].difference
            if difference is not None:
                interval = difference.spread.interval if difference.spread is not None else None
                found.append(
                    GroupDifference(
                        axis=axis, group=group, prompts=difference.prompts, difference=difference.value, interval=interval
                    )
                )
    return found


def _by_size(group: str) -> tuple[int, str]:
    """Length buckets from short to long, other names by the alphabet."""
    order = [length_bucket(tokens) for tokens in (*_LENGTHS, _LENGTHS[-1] + 1)]
    return (order.index(group) if group in order else 0, group)
