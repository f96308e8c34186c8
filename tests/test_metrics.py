"""tau, streaks, histogram and requests, on walks worked out by hand."""

from dataclasses import replace

import pytest

from dflash_model.errors import StageError
from dflash_model.metrics import (
    PER_REQUEST,
    POOLED,
    by_category,
    ddtree_tau,
    request_rows,
    requests_without_steps,
    step_histogram,
    streak_tau,
    tau_per_request,
    tau_pooled,
)
from dflash_model.replay.walk import TRUNCATED, ZLAB
from tests.made_up_records import hand_records, made_up_records

RIGHT, WRONG = 0, 9

# Prompt 2 tokens, completion at positions 2..7 (6 tokens, a stop token at 7), three drafted tokens.
# Anchor 2 accepts two drafts (positions 3, 4), the bonus token is position 5; anchor 5 drafts 6, 7 and one past the end.
STOP_IN_BLOCK = hand_records(
    "stop-in-block",
    [[RIGHT, RIGHT, WRONG], [WRONG] * 3, [WRONG] * 3, [RIGHT, RIGHT, RIGHT], [WRONG] * 3, [WRONG] * 3],
    completion=6,
    overshoot=3,
)
EMPTY = hand_records("empty", [], completion=0)
ONE_TOKEN = hand_records("one-token", [[WRONG] * 3], completion=1)


def test_a_stop_token_inside_an_accepted_block_cuts_the_step_or_not() -> None:
    """truncated: 3 + 2 tokens (all 5 after prefill). zlab: the last step counts its 3 drafts and the bonus token."""
    (cut,) = request_rows([STOP_IN_BLOCK], tail=TRUNCATED)
    assert (cut.anchors, cut.step_tokens, cut.tau) == ((2, 5), (3, 2), 2.5)
    (full,) = request_rows([STOP_IN_BLOCK], tail=ZLAB)
    assert (full.anchors, full.step_tokens, full.tau) == ((2, 5), (3, 4), 3.5)


def test_a_limit_at_a_block_border_gives_zlab_one_more_step() -> None:
    """The second step ends on the last token: without a stop token z-lab drafts once more from it, engines do not."""
    ranks = [[RIGHT, WRONG, WRONG], [WRONG] * 3, [RIGHT, WRONG, WRONG], [WRONG] * 3, [WRONG] * 3]
    limited = hand_records("limit", ranks, completion=5, overshoot=3, stopped=False)
    assert request_rows([limited], tail=TRUNCATED)[0].step_tokens == (2, 2)
    assert request_rows([limited], tail=ZLAB)[0].step_tokens == (2, 2, 1)
    stopped = replace(limited, sequence=replace(limited.sequence, stopped=True))
    assert request_rows([stopped], tail=ZLAB)[0].step_tokens == (2, 2)


def test_a_limit_in_the_middle_of_a_block_cuts_the_step() -> None:
    """Completion of 3 tokens: one step wants 2 more, accepts 3 drafts, and earns 2 (truncated) or 4 (zlab)."""
    limited = hand_records("limit", [[RIGHT] * 3, [WRONG] * 3, [WRONG] * 3], completion=3, overshoot=3, stopped=False)
    assert request_rows([limited], tail=TRUNCATED)[0].step_tokens == (2,)
    assert request_rows([limited], tail=ZLAB)[0].step_tokens == (4,)


def test_requests_without_a_step_are_named_and_never_a_zero() -> None:
    rows = request_rows([EMPTY, STOP_IN_BLOCK, ONE_TOKEN])
    assert requests_without_steps(rows) == ["empty", "one-token"]
    assert rows[0].tau is None
    assert tau_pooled(rows).value == 2.5
    assert tau_per_request(rows).value == 2.5
    assert sum(row.tau or 0 for row in rows) / 3 != 2.5


def test_nothing_measured_is_none() -> None:
    for rows in ([], request_rows([EMPTY, ONE_TOKEN])):
        assert tau_pooled(rows).value is None
        assert tau_per_request(rows).value is None
    assert streak_tau([EMPTY], 4).value is None
    assert ddtree_tau([EMPTY], 2).value is None


def test_pooled_and_per_request_weigh_the_same_steps_differently() -> None:
    """Steps 3, 2 and four steps of 1 token: pooled 9 / 6, per request (2.5 + 1) / 2."""
    slow = hand_records("slow", [[WRONG] * 3] * 5, completion=5)
    rows = request_rows([STOP_IN_BLOCK, slow])
    pooled, per_request = tau_pooled(rows), tau_per_request(rows)
    assert (pooled.value, pooled.aggregation, pooled.bonus) == (9 / 6, POOLED, True)
    assert (per_request.value, per_request.aggregation) == (1.75, PER_REQUEST)


def test_the_histogram_counts_cut_steps_as_cut() -> None:
    assert step_histogram(request_rows([STOP_IN_BLOCK, EMPTY], tail=TRUNCATED)) == {2: 1, 3: 1}
    assert step_histogram(request_rows([STOP_IN_BLOCK, EMPTY], tail=ZLAB)) == {3: 1, 4: 1}


def test_a_streak_of_width_one_is_the_chain() -> None:
    samples = made_up_records(1, sharpness=3.0, late=0.3, prompts=6)
    chain = tau_pooled(request_rows(samples)).value
    assert streak_tau(samples, 1).value == chain
    assert (streak_tau(samples, 4).value or 0) > (chain or 0)
    assert streak_tau(samples, 1, tail=ZLAB).value == tau_pooled(request_rows(samples, tail=ZLAB)).value


def test_a_streak_walks_on_its_own_steps() -> None:
    """Rank 3 at anchor 2 is inside the top 4, so the streak goes from 2 to 4 and never sees anchor 3, where the chain goes."""
    ranks = [[3, WRONG, WRONG], [RIGHT, RIGHT, WRONG], [RIGHT, WRONG, WRONG], [WRONG] * 3, [WRONG] * 3]
    sample = hand_records("own-walk", ranks, completion=5)
    assert request_rows([sample])[0].anchors == (2, 3)
    assert streak_tau([sample], 3).value == 4 / 2
    assert streak_tau([sample], 4).value == 4 / 2
    widened = hand_records("own-walk", [ranks[0], [WRONG] * 3, *ranks[2:]], completion=5)
    assert streak_tau([widened], 3).value == 4 / 3
    assert streak_tau([widened], 4).value == 4 / 2


def test_a_tree_that_the_records_are_too_narrow_for_is_not_measured() -> None:
    narrow = hand_records("narrow", [[RIGHT, 1, WRONG]] * 4, completion=4)
    assert ddtree_tau([narrow], 4).value is not None
    assert ddtree_tau([narrow], 16).value is None
    assert ddtree_tau([narrow], 16, vocab_size=4).value is not None


def test_a_walk_that_runs_out_of_records_is_an_error() -> None:
    whole = STOP_IN_BLOCK
    parts = {
        name: getattr(whole, name)[:2]
        for name in ("anchors", "true_ids", "true_rank", "true_logprob", "top_ids", "top_logprobs", "log_sum_exp")
    }
    with pytest.raises(StageError, match="stop-in-block have no anchor 5"):
        request_rows([replace(whole, **parts)])


def test_categories_group_the_rows_and_leave_out_who_has_none() -> None:
    samples = [STOP_IN_BLOCK, EMPTY, ONE_TOKEN]
    rows = request_rows(samples, categories={"empty": "b", "stop-in-block": "a"})
    assert {name: [row.sample_id for row in group] for name, group in by_category(rows).items()} == {
        "a": ["stop-in-block"],
        "b": ["empty"],
    }
    assert rows[2].category is None
