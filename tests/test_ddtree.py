"""DDTree: the tree of the best prefixes, and how much of the true path lies in it."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_model.ddtree import Prefix, ddtree_matched, tree_nodes
from dflash_model.metrics import ddtree_tau, request_rows
from dflash_model.replay.records import NEVER, UNKNOWN, SampleRecords
from dflash_model.replay.walk import streak_matched
from tests.made_up_records import hand_records, made_up_records

Logprobs = npt.NDArray[np.float64]
BY_HAND = np.array([[-1.0, -2.0, -3.0], [-1.0, -2.0, -4.0]])
BY_HAND_ORDER = [(0,), (0, 0), (1,), (0, 1), (1, 0), (2,), (1, 1), (2, 0), (0, 2), (2, 1), (1, 2), (2, 2)]
"""Scores -1 | -2 -2 | -3 -3 -3 | -4 -4 | -5 -5 | -6 | -7, ties by rank tuple."""


def best_prefixes(logprobs: Logprobs) -> list[Prefix]:
    """All prefixes of a small vocabulary, each scored on its own, best first."""
    scored = []
    for depth in range(1, len(logprobs) + 1):
        for prefix in product(range(logprobs.shape[1]), repeat=depth):
            score = 0.0
            for slot, rank in zip(logprobs, prefix, strict=False):
                score += float(slot[rank])
            scored.append((-score, prefix))
    return [prefix for _, prefix in sorted(scored)]


def records_of(logprobs: Logprobs, path: Prefix) -> SampleRecords:
    """One anchor whose true tokens have the ranks of `path`."""
    return hand_records("one", [list(path)], completion=len(path) + 2, logprobs=logprobs[None])


@st.composite
def trees(draw: st.DrawFn) -> tuple[Logprobs, Prefix, int]:
    """Small slots with many equal scores, a true path and a budget."""
    depth, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    quarters = draw(st.lists(st.integers(-8, 0), min_size=depth * vocab, max_size=depth * vocab))
    logprobs = -np.sort(-np.array(quarters, dtype=np.float64).reshape(depth, vocab) / 4, axis=1)
    path = tuple(draw(st.lists(st.integers(0, vocab - 1), min_size=depth, max_size=depth)))
    return logprobs, path, draw(st.integers(1, 40))


def test_the_order_of_a_tree_worked_out_by_hand() -> None:
    assert tree_nodes(BY_HAND, 4) == BY_HAND_ORDER[:4]
    assert tree_nodes(BY_HAND, 100) == BY_HAND_ORDER


@pytest.mark.parametrize(
    ("path", "budget", "matched"),
    [
        ((0, 1), 1, 1),
        ((0, 1), 3, 1),
        ((0, 1), 4, 2),
        ((1, 0), 2, 0),
        ((1, 0), 3, 1),
        ((1, 0), 4, 1),
        ((1, 0), 5, 2),
        ((2, 0), 5, 0),
        ((2, 0), 6, 1),
        ((2, 0), 8, 2),
    ],
)
def test_the_root_is_not_part_of_the_budget(path: Prefix, budget: int, matched: int) -> None:
    assert ddtree_matched(records_of(BY_HAND, path), 0, budget=budget, vocab_size=3) == matched


def test_a_deeper_prefix_takes_a_node_from_a_shallow_one() -> None:
    """(0, 0) and (0, 0, 0) come before (1,): a count over slots 1 alone would let (1,) into a tree of two."""
    logprobs = np.array([[-0.1, -2.0], [-0.1, -3.0], [-0.1, -3.0]])
    record = records_of(logprobs, (1, 0, 0))
    assert [ddtree_matched(record, 0, budget=budget, vocab_size=2) for budget in (1, 2, 3, 4)] == [0, 0, 0, 1]


@settings(max_examples=300, deadline=None)
@given(trees())
def test_the_tree_is_the_best_prefixes_of_a_brute_force(tree: tuple[Logprobs, Prefix, int]) -> None:
    logprobs, path, budget = tree
    expected = best_prefixes(logprobs)[:budget]
    assert tree_nodes(logprobs, budget) == expected
    depths = [depth for depth in range(1, len(path) + 1) if path[:depth] in expected]
    record = records_of(logprobs, path)
    assert ddtree_matched(record, 0, budget=budget, vocab_size=logprobs.shape[1]) == max(depths, default=0)


@settings(max_examples=100, deadline=None)
@given(trees())
def test_trees_are_nested_and_bounded_by_the_streak_of_their_width(tree: tuple[Logprobs, Prefix, int]) -> None:
    logprobs, path, budget = tree
    record, vocab = records_of(logprobs, path), logprobs.shape[1]
    assert set(tree_nodes(logprobs, budget)) <= set(tree_nodes(logprobs, budget + 1))
    matched = [ddtree_matched(record, 0, budget=size, vocab_size=vocab) for size in (budget, budget + 1)]
    assert matched[0] <= matched[1]
    assert matched[0] <= streak_matched(record, 0, width=min(budget, vocab))


def test_candidates_past_the_budget_never_matter() -> None:
    for records in made_up_records(3, sharpness=3.0, late=0.3, prompts=3):
        wide = [ddtree_matched(records, row, budget=16) for row in range(len(records.anchors))]
        for row, matched in enumerate(wide):
            nodes = set(tree_nodes(records.top_logprobs[row, :, :16], 16))
            path = tuple(records.true_rank[row].tolist())
            assert matched == max((depth for depth in range(1, len(path) + 1) if path[:depth] in nodes), default=0)
        assert max(wide) > 0
        assert min(wide) < records.true_rank.shape[1]


def test_an_unknown_token_ends_the_match() -> None:
    record = hand_records("one", [[0, 0, 0]], completion=2, logprobs=[-0.1, -3.0])
    assert record.true_rank[0].tolist() == [0, UNKNOWN, UNKNOWN]
    assert ddtree_matched(record, 0, budget=2) == 1


def test_too_few_candidates_are_refused_with_both_numbers() -> None:
    record = records_of(BY_HAND, (0, 0))
    with pytest.raises(ValueError, match=r"DDTree-4: K = 3, needed 4"):
        ddtree_matched(record, 0, budget=4)
    assert ddtree_matched(record, 0, budget=4, vocab_size=3) == 2


def test_senseless_input_is_refused() -> None:
    with pytest.raises(ValueError, match="budget 0"):
        tree_nodes(BY_HAND, 0)
    with pytest.raises(ValueError, match="budget 0"):
        ddtree_matched(records_of(BY_HAND, (0, 0)), 0, budget=0)
    with pytest.raises(ValueError, match="best first"):
        tree_nodes(BY_HAND[:, ::-1], 4)
    with pytest.raises(ValueError, match="best first"):
        tree_nodes(np.array([[-1.0, np.nan]]), 4)


def test_rounding_above_zero_does_not_lift_a_child_over_its_parent() -> None:
    assert tree_nodes(np.array([[1e-7, -5.0], [1e-7, -5.0]]), 2) == [(0,), (0, 0)]


def test_a_bigger_tree_earns_more_on_its_own_walk() -> None:
    samples = made_up_records(4, sharpness=3.0, late=0.3, prompts=4)
    taus = []
    for budget in (1, 16, 64):
        rows = request_rows(samples, partial(ddtree_matched, budget=budget))
        taus.append(sum(row.tokens for row in rows) / sum(row.steps for row in rows))
    assert taus == sorted(taus)
    assert taus[0] < taus[1] < taus[2]


def test_a_token_that_is_never_drafted_ends_the_match() -> None:
    record = records_of(BY_HAND, (0, 0))
    record.true_rank[0, 1] = NEVER
    assert ddtree_matched(record, 0, budget=3, vocab_size=3) == ddtree_matched(record, 0, budget=9, vocab_size=3) == 1


def test_slots_that_depend_on_each_other_have_no_product_of_marginals() -> None:
    record = replace(records_of(BY_HAND, (0, 0)), selected_ids=np.zeros((1, 2), np.int32))
    with pytest.raises(ValueError, match="conditional on the token before"):
        ddtree_matched(record, 0, budget=2)
    assert ddtree_tau([record], 2).value is None
