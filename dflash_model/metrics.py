"""tau and its relatives: pure functions of records. A number never travels without its definition (`Metric`).

tau counts the bonus token and not the token from prefill. Pooled and per-request tau differ on the same steps, and can
even move in opposite directions, because an easy request has fewer steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dflash_model.ddtree import ddtree_matched
from dflash_model.errors import StageError
from dflash_model.replay.records import SampleRecords
from dflash_model.replay.walk import TRUNCATED, Matcher, Walk, chain_matched, streak_matched, walk

POOLED = "pooled over steps"
PER_REQUEST = "mean over requests"
STREAK_WIDTHS = (4, 8)
TREE_BUDGETS = (16, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One number and what it means."""

    value: float | None
    """The number; None where nothing was measured."""

    definition: str
    """One sentence."""

    bonus: bool
    """Whether the bonus token of each step is counted."""

    aggregation: str
    """POOLED or PER_REQUEST."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRow:
    """The verify steps of one request under one drafter."""

    sample_id: str
    """The prompt's id."""

    category: str | None
    """The prompt's category, None where it has none."""

    anchors: tuple[int, ...]
    """Position at which each step started."""

    step_tokens: tuple[int, ...]
    """Tokens earned by each step, bonus token included; empty for an empty or one-token completion."""

    @property
    def steps(self) -> int:
        """Verify steps."""
        return len(self.step_tokens)

    @property
    def tokens(self) -> int:
        """Tokens earned by all steps; the token from prefill is not among them."""
        return sum(self.step_tokens)

    @property
    def tau(self) -> float | None:
        """Tokens per step of this request; None where it has no step."""
        return self.tokens / self.steps if self.steps else None


def complete_walk(records: SampleRecords, matcher: Matcher, *, tail: str = TRUNCATED) -> Walk:
    """`replay.walk.walk`, but a walk that runs out of records is a StageError and never a shorter request."""
    result = walk(records, matcher, tail=tail)
    if result.missing is not None:
        raise StageError(
            f"The records of {records.sequence.sample_id} have no anchor {result.missing}, which this walk reaches.",
            "Run the replay again with this walk (chain, streak width or tree budget, and tail rule) among its walks.",
        )
    return result


def request_rows(
    samples: Iterable[SampleRecords],
    matcher: Matcher = chain_matched,
    *,
    tail: str = TRUNCATED,
    categories: Mapping[str, str] | None = None,
) -> list[RequestRow]:
    """One row a request, in the given order, each on `matcher`'s own walk. Raises StageError for missing anchors."""
    rows = []
    for records in samples:
        steps = complete_walk(records, matcher, tail=tail)
        sample_id = records.sequence.sample_id
        category = (categories or {}).get(sample_id)
        rows.append(RequestRow(sample_id=sample_id, category=category, anchors=steps.anchors, step_tokens=steps.steps))
    return rows


def tau_pooled(rows: Sequence[RequestRow]) -> Metric:
    """Sum of tokens / number of steps, over all requests; None without a step."""
    steps = sum(row.steps for row in rows)
    return Metric(
        value=sum(row.tokens for row in rows) / steps if steps else None,
        definition="Tokens per verify step: all tokens of all steps over the number of steps. "
        "Accepted drafts and the bonus token count; the token from prefill does not.",
        bonus=True,
        aggregation=POOLED,
    )


def tau_per_request(rows: Sequence[RequestRow]) -> Metric:
    """Mean of the requests' own tau over those with at least one step; None without any."""
    taus = [row.tau for row in rows if row.tau is not None]
    return Metric(
        value=sum(taus) / len(taus) if taus else None,
        definition="Tokens per verify step of each request, then the mean over requests with at least one step, "
        "so a short request weighs as much as a long one.",
        bonus=True,
        aggregation=PER_REQUEST,
    )


def streak_tau(samples: Iterable[SampleRecords], width: int, *, tail: str = TRUNCATED) -> Metric:
    """Pooled tau if a step accepted every leading slot whose true token is in the slot's top `width`, on its own walk.

    Width 1 is the chain. Raises StageError for missing anchors.
    """
    rows = request_rows(samples, partial(streak_matched, width=width), tail=tail)
    return Metric(
        value=tau_pooled(rows).value,
        definition=f"Tokens per step if a slot counted as right whenever the true token is among its {width} best candidates: "
        f"an upper bound for any draft tree {width} wide, not a tree's tau. Walked on its own steps.",
        bonus=True,
        aggregation=POOLED,
    )


def ddtree_tau(samples: Iterable[SampleRecords], budget: int, *, tail: str = TRUNCATED, vocab_size: int | None = None) -> Metric:
    """Pooled tau of a DDTree of `budget` nodes on its own walk; None where the records keep too few candidates to say, or
    where the drafter's slots depend on each other (DFlash2), so that the product of marginals is not what it drafts.

    Raises StageError for missing anchors.
    """
    samples = list(samples)
    needed = budget if vocab_size is None else min(budget, vocab_size)
    measurable = all(
        records.top_logprobs.shape[2] >= needed and not records.conditional for records in samples if len(records.anchors)
    )
    rows = request_rows(samples, partial(ddtree_matched, budget=budget, vocab_size=vocab_size), tail=tail) if measurable else []
    return Metric(
        value=tau_pooled(rows).value,
        definition=f"Tokens per step when a DDTree of {budget} nodes (the root not counted) is verified: the {budget} most "
        "probable prefixes under the product of the slots' probabilities. Walked on its own steps.",
        bonus=True,
        aggregation=POOLED,
    )


def step_histogram(rows: Iterable[RequestRow]) -> dict[int, int]:
    """Tokens of a step -> how many steps earned that many, ascending. A step cut by the tail rule counts as cut."""
    counts = Counter(tokens for row in rows for tokens in row.step_tokens)
    return dict(sorted(counts.items()))


def by_category(rows: Iterable[RequestRow]) -> dict[str, list[RequestRow]]:
    """Rows by category, names sorted; rows without a category are in none."""
    groups: dict[str, list[RequestRow]] = {}
    for row in rows:
        if row.category is not None:
            groups.setdefault(row.category, []).append(row)
    return dict(sorted(groups.items()))


def requests_without_steps(rows: Iterable[RequestRow]) -> list[str]:
    """Ids of the requests that no tau includes: empty or one-token completions."""
    return [row.sample_id for row in rows if not row.steps]
