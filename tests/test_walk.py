"""replay/walk.py: steps worked out by hand, for both tail rules."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_model.replay.records import NEVER, UNKNOWN, SampleRecords, Sequence
from dflash_model.replay.walk import (
    DEEPSPEC,
    PYPI,
    TRUNCATED,
    ZLAB,
    block_rows,
    chain_matched,
    first_anchor,
    streak_matched,
    take_step,
    walk,
)

LIMIT = Sequence(sample_id="a", prompt_length=10, completion_length=8, overshoot_length=3, stopped=False)
STOP = replace(LIMIT, stopped=True)
"""Positions 10..17 are the completion; 10 comes from prefill; end = 18."""


def records_of(sequence: Sequence, ranks: dict[int, list[int]]) -> SampleRecords:
    """One row per anchor with these ranks of the true tokens."""
    anchors = sorted(ranks)
    true_rank = np.array([ranks[anchor] for anchor in anchors], np.int32)
    empty = np.zeros((*true_rank.shape, 1), np.float32)
    return SampleRecords(
        sequence=sequence, anchors=np.array(anchors, np.int32), true_ids=true_rank, true_rank=true_rank,
        true_logprob=empty[..., 0], top_ids=empty.astype(np.int32), top_logprobs=empty, log_sum_exp=empty[..., 0],
    )  # fmt: skip


def test_matched_counts_leading_ranks_below_the_width() -> None:
    records = records_of(LIMIT, {10: [0, 0, 2, 0], 11: [1, 0, 0, 0], 12: [0, 0, 0, 0], 13: [0, UNKNOWN, 0, 0]})
    assert [chain_matched(records, row) for row in range(4)] == [2, 0, 4, 1]
    assert [streak_matched(records, row, width=2) for row in range(4)] == [2, 4, 4, 1]
    assert [streak_matched(records, row, width=3) for row in range(4)] == [4, 4, 4, 1]


def test_a_token_that_is_never_drafted_ends_every_match() -> None:
    records = records_of(LIMIT, {10: [0, 0, NEVER, 0]})
    assert [streak_matched(records, 0, width=width) for width in (1, 8, 1 << 20)] == [2, 2, 2]


def test_each_step_is_the_matched_prefix_and_the_bonus_token() -> None:
    records = records_of(LIMIT, {10: [0, 0, 1], 13: [1, 0, 0], 14: [0, 1, 0], 16: [0, 0, 0]})
    found = walk(records, chain_matched, tail=TRUNCATED)
    assert found.anchors == (10, 13, 14, 16)
    assert found.steps == (3, 1, 2, 1)  # at 16 only position 17 is still wanted
    assert found.missing is None
    assert sum(found.steps) == LIMIT.completion_length - 1  # the token from prefill is not counted


def test_the_last_step_is_cut_under_truncated_and_counts_in_full_under_zlab() -> None:
    ranks = {10: [0, 0, 0], 14: [0, 0, 0]}
    assert walk(records_of(LIMIT, ranks), chain_matched, tail=TRUNCATED).steps == (4, 3)
    assert walk(records_of(LIMIT, ranks), chain_matched, tail=ZLAB).steps == (4, 4)


def test_only_a_request_at_its_limit_starts_a_step_at_its_last_token_and_only_under_zlab() -> None:
    ranks = {10: [0, 0, 0], 14: [0, 0, 1], 17: [0, 0, 0]}
    assert walk(records_of(LIMIT, ranks), chain_matched, tail=TRUNCATED).steps == (4, 3)
    assert walk(records_of(LIMIT, ranks), chain_matched, tail=ZLAB).steps == (4, 3, 4)
    assert walk(records_of(STOP, ranks), chain_matched, tail=ZLAB).steps == (4, 3)


def test_a_walk_stops_at_the_first_anchor_without_a_record() -> None:
    found = walk(records_of(LIMIT, {10: [0, 1, 0], 13: [0, 0, 0]}), chain_matched)
    assert (found.anchors, found.steps, found.missing) == ((10,), (2,), 12)


def test_a_request_of_one_token_has_a_step_only_under_zlab() -> None:
    one = replace(LIMIT, completion_length=1)
    assert first_anchor(one, TRUNCATED) is None
    assert first_anchor(one, ZLAB) == 10
    assert first_anchor(replace(one, stopped=True), ZLAB) == 10  # z-lab's loop verifies before it looks for the stop token
    assert first_anchor(replace(LIMIT, completion_length=0), ZLAB) is None
    assert walk(records_of(one, {10: [0, 0, 0]}), chain_matched) == walk(records_of(one, {11: [0, 0, 0]}), chain_matched)


@pytest.mark.parametrize(
    ("sequence", "tail", "anchor", "matched", "expected"),
    [
        (LIMIT, TRUNCATED, 10, 2, (3, 13)),
        (LIMIT, TRUNCATED, 15, 1, (2, None)),
        (LIMIT, TRUNCATED, 15, 3, (2, None)),
        (LIMIT, TRUNCATED, 15, 0, (1, 16)),
        (LIMIT, ZLAB, 15, 1, (2, 17)),
        (STOP, ZLAB, 15, 1, (2, None)),
        (STOP, ZLAB, 15, 0, (1, 16)),
        (LIMIT, ZLAB, 15, 3, (4, None)),
        (LIMIT, ZLAB, 17, 3, (4, None)),
        # DeepSpec: an accepted stop token (position 17) ends the request without a bonus; a bonus stop token counts.
        (STOP, DEEPSPEC, 15, 3, (2, None)),
        (STOP, DEEPSPEC, 15, 2, (2, None)),
        (STOP, DEEPSPEC, 15, 1, (2, None)),
        (STOP, DEEPSPEC, 15, 0, (1, 16)),
        (STOP, DEEPSPEC, 14, 3, (3, None)),
        (LIMIT, DEEPSPEC, 15, 3, (4, None)),
        (LIMIT, DEEPSPEC, 15, 1, (2, 17)),
        (LIMIT, DEEPSPEC, 17, 3, (4, None)),
        (LIMIT, PYPI, 15, 3, (2, None)),
        (STOP, PYPI, 15, 0, (1, 16)),
    ],
)
def test_take_step(sequence: Sequence, tail: str, anchor: int, matched: int, expected: tuple[int, int | None]) -> None:
    assert take_step(sequence, anchor, matched=matched, tail=tail) == expected


def test_an_unknown_tail_is_refused() -> None:
    with pytest.raises(ValueError, match="tail 'dflash'"):
        first_anchor(LIMIT, "dflash")


def test_a_first_token_that_stops_leaves_deepspec_no_step_and_zlab_one() -> None:
    one = replace(STOP, completion_length=1)
    assert [first_anchor(one, tail) for tail in (TRUNCATED, PYPI, DEEPSPEC, ZLAB)] == [None, None, None, 10]
    assert first_anchor(replace(LIMIT, completion_length=1), DEEPSPEC) == 10


def test_only_pypi_shortens_blocks_and_only_before_its_limit() -> None:
    """Limit at position 18: from 14 on a block of 5 would reach past it; the last block has two rows."""
    assert [block_rows(a, block_size=5, tail=PYPI, limit=18) for a in (10, 13, 14, 15, 16)] == [5, 5, 4, 3, 2]
    assert block_rows(14, block_size=5, tail=PYPI, limit=19) == 5  # the token at 18 is still wanted
    for tail in (TRUNCATED, ZLAB, DEEPSPEC):
        assert block_rows(16, block_size=5, tail=tail, limit=18) == 5
    assert block_rows(16, block_size=5, tail=PYPI, limit=None) == 5
