"""DDTree: the draft tree of the `budget` most probable prefixes under the product of the slots' marginals.

A prefix is a tuple of ranks, one per depth: rank r at depth m stands for the r-th best candidate of slot m. The
budget counts tree nodes without the root (the anchor), so a tree of budget B costs 1 + B verified tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_model.replay.records import UNKNOWN, SampleRecords

Prefix = tuple[int, ...]
Marginals = Sequence[Sequence[float]]


def tree_nodes(top_logprobs: npt.NDArray[np.floating[Any]], budget: int) -> list[Prefix]:
    """The tree's nodes in the order in which best-first search takes them, at most `budget`.

    `top_logprobs` [D, K] holds natural log-probabilities per slot, best first. Of equal prefixes the smaller rank
    tuple goes first. The tree is exact if K >= min(budget, V): a child of rank r comes after its r better siblings, so
    no node of rank >= budget can enter. ValueError for a budget below 1 or slots that are not sorted.
    """
    if budget < 1:
        raise ValueError(f"DDTree budget {budget}, expected at least 1")
    return list(islice(_best_first(_marginals(top_logprobs)), budget))


def ddtree_matched(records: SampleRecords, row: int, *, budget: int, vocab_size: int | None = None) -> int:
    """How many leading true tokens of block `row` lie in its DDTree of `budget` nodes: a Matcher of replay.walk.

    This is the deepest m whose true prefix is among the `budget` best prefixes. It counts the prefixes ahead of the true
    one instead of building the tree, and stops at the budget. ValueError where the records keep fewer than
    min(budget, vocab_size) candidates (a vocabulary of unknown size counts as larger than the budget), or where slots
    depend on each other, so that they have no marginals.
    """
    if budget < 1:
        raise ValueError(f"DDTree budget {budget}, expected at least 1")
    if records.conditional:
        raise ValueError("A DDTree needs the slots' marginals; these records are conditional on the token before each slot.")
    kept = records.top_logprobs.shape[2]
    needed = budget if vocab_size is None else min(budget, vocab_size)
    if kept < needed:
        raise ValueError(
            f"The records keep too few candidates for DDTree-{budget}: K = {kept}, needed {needed}. "
            f"Replay with at least {needed} candidates per slot."
        )
    path = _reachable_path(records.true_rank[row].tolist(), budget)
    if not path:
        return 0
    marginals = _marginals(records.top_logprobs[row, :, :budget])
    low, high = 0, len(path)
    while low < high:
        middle = (low + high + 1) // 2
        if _is_within(marginals, path[:middle], budget):
            low = middle
        else:
            high = middle - 1
    return low


def _marginals(top_logprobs: npt.NDArray[np.floating[Any]]) -> list[list[float]]:
    """Float64 rows. Rounding may leave a log-probability just above 0; it is cut there, so no child beats its parent."""
    rows = np.minimum(top_logprobs.astype(np.float64), 0.0)
    if np.any(rows[:, 1:] > rows[:, :-1]) or np.any(np.isnan(rows)):
        raise ValueError("top_logprobs must be numbers sorted best first")
    return rows.tolist()  # type: ignore[no-any-return]


def _best_first(marginals: Marginals) -> Iterator[Prefix]:
    """All prefixes, best first. Entries: (-score, prefix, parent's score); a pop adds the next sibling and the first child."""
    heap: list[tuple[float, Prefix, float]] = []
    if marginals and marginals[0]:
        heap.append((-marginals[0][0], (0,), 0.0))
    while heap:
        negative, prefix, parent_score = heapq.heappop(heap)
        yield prefix
        depth, sibling = len(prefix), prefix[-1] + 1
        if sibling < len(marginals[depth - 1]):
            score = parent_score + marginals[depth - 1][sibling]
            heapq.heappush(heap, (-score, (*prefix[:-1], sibling), parent_score))
        if depth < len(marginals):
            heapq.heappush(heap, (-(-negative + marginals[depth][0]), (*prefix, 0), -negative))


def _reachable_path(ranks: Sequence[int], budget: int) -> Prefix:
    """The true prefix as deep as any scores could let it into the tree.

    Every prefix with componentwise smaller or equal ranks is at least as good, so depth m needs
    sum over l <= m of prod over i <= l of (rank_i + 1) nodes.
    """
    needed, width = 0, 1
    for depth, rank in enumerate(ranks):
        if rank == UNKNOWN:
            return tuple(ranks[:depth])
        width *= rank + 1
        needed += width
        if needed > budget:
            return tuple(ranks[:depth])
    return tuple(ranks)


def _is_within(marginals: Marginals, path: Prefix, budget: int) -> bool:
    """Whether fewer than `budget` prefixes come before `path`; deeper prefixes than `path` can be among them.

    Children and later siblings never come before their parent or earlier sibling, so the walk leaves a branch at the
    first prefix that is not ahead of `path`.
    """
    target = 0.0
    for slot, rank in zip(marginals, path, strict=False):
        target += slot[rank]
    ahead = 0
    pending: list[tuple[float, Prefix]] = [(0.0, ())]
    while pending:
        parent_score, parent = pending.pop()
        depth = len(parent)
        for rank, logprob in enumerate(marginals[depth]):
            score = parent_score + logprob
            if score < target or (score == target and (*parent, rank) >= path):
                break
            ahead += 1
            if ahead >= budget:
                return False
            if depth + 1 < len(marginals):
                pending.append((score, (*parent, rank)))
    return True
