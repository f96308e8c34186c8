"""The same steps under others' definitions, by hand; what the records cannot say is None."""

import math
from dataclasses import replace

import numpy as np
import pytest

from dflash_model.errors import StageError
from dflash_model.metrics import request_rows, tau_per_request, tau_pooled
from dflash_model.other_taus import completion_per_verify, other_taus, rejection_bounds, rows_under, uniform_tau
from dflash_model.replay.walk import DEEPSPEC, PYPI, TRUNCATED, ZLAB
from tests.made_up_records import hand_records

R, W = 0, 9
STOPPED = hand_records("stopped", [[R, R, W], [W] * 3, [W] * 3, [R, R, R], [W] * 3, [W] * 3], completion=6, overshoot=3)
"""Steps 3 and 2 (truncated), 3 and 4 (zlab); DeepSpec: the stop token at position 7 is an accepted draft, so 2."""
LIMITED = hand_records("limited", [[R, W, W], [W] * 3, [R, R, R], [W] * 3, [W] * 3], completion=5, overshoot=3, stopped=False)
"""Steps 2 and 2 (truncated); 2 and 4 (zlab, DeepSpec)."""


def test_every_tail_counts_the_same_records_in_its_own_way() -> None:
    samples = [STOPPED, LIMITED]
    found = other_taus(samples, request_rows(samples), tail=TRUNCATED)
    values = {name.removeprefix("tau, tail "): m.value for name, m in found.items() if name.startswith("tau, tail")}
    assert values == {TRUNCATED: 9 / 4, ZLAB: 13 / 4, DEEPSPEC: 11 / 4, PYPI: None}
    assert found["tau per request, tail deepspec"].value == (5 / 2 + 6 / 2) / 2
    assert all(metric.definition and metric.aggregation for metric in found.values())


def test_a_tail_that_the_replay_did_not_prepare_is_not_guessed() -> None:
    blind = replace(LIMITED, sequence=replace(LIMITED.sequence, overshoot_length=2))
    assert rows_under([blind], ZLAB, replayed=TRUNCATED) is None
    assert rows_under([replace(STOPPED, sequence=replace(STOPPED.sequence, overshoot_length=0))], DEEPSPEC, replayed=TRUNCATED)
    assert rows_under([LIMITED], PYPI, replayed=TRUNCATED) is None
    assert rows_under([LIMITED], TRUNCATED, replayed=PYPI) is None
    assert rows_under([LIMITED.at([0, 1])], TRUNCATED, replayed=TRUNCATED) is None  # anchor 4 is not there


def test_completion_tokens_per_verify_count_the_token_from_prefill() -> None:
    """6 tokens in 2 steps, 5 in 2, and one token without a step, which no figure holds."""
    samples = [STOPPED, LIMITED, hand_records("one", [[W] * 3], completion=1)]
    found = completion_per_verify(samples, request_rows(samples))
    assert found["completion tokens per verify"].value == 11 / 4
    assert found["completion tokens per verify, per request"].value == (3 + 2.5) / 2
    assert all(metric.value is None for metric in completion_per_verify(samples[2:], request_rows(samples[2:])).values())


def test_pooled_can_rise_while_the_mean_over_requests_falls() -> None:
    """Before: a long request 20 tokens in 10 steps, a short one 4 in 1. After: 20 in 8, and 4 in 2."""
    long_before, long_after = [[R, W, W]] * 20, [[R, W, W]] * 20
    long_after[0] = long_after[4] = [R, R, R]
    short_before, short_after = [[R, R, R]] * 4, [[R, W, W]] * 4
    rows = [
        request_rows([hand_records("long", long, completion=21), hand_records("short", short, completion=5)])
        for long, short in ((long_before, short_before), (long_after, short_after))
    ]
    assert [[row.step_tokens for row in one] for one in rows] == [
        [(2,) * 10, (4,)],
        [(4, 4, *(2,) * 6), (2, 2)],
    ]
    assert [tau_pooled(one).value for one in rows] == [24 / 11, 24 / 10]
    assert [tau_per_request(one).value for one in rows] == [3.0, (20 / 8 + 2) / 2]


def test_the_uniform_anchor_tau_looks_at_every_position() -> None:
    """LIMITED, anchors 2..5 of end 7: tokens 2, 1, min(4, 2), 1. Every second: 2 and 2."""
    assert uniform_tau([LIMITED], 1).value == 6 / 4
    assert uniform_tau([LIMITED], 1, tail=ZLAB).value == 8 / 4
    assert uniform_tau([LIMITED], 2).value == 4 / 2
    assert uniform_tau([LIMITED], None).value is None
    with pytest.raises(StageError, match="no anchor 3 of stride 1"):
        uniform_tau([LIMITED.at([0, 2])], 1)


def test_rejection_sampling_is_bounded_by_what_the_true_tokens_tell() -> None:
    """One step that wants 3 tokens: slots 1 and 2 decide. p* .8, .5; q* .6, .9.

    Slot 1: least .6, most .6 + min(.2, .4) = .8. Slot 2: .5, and .5 + min(.5, .1) = .6.
    """
    sample = hand_records("s", [[R, R, R]] * 3, completion=4, overshoot=3)
    q = np.log(np.array([[0.6, 0.9, 0.3]] * 3, dtype=np.float32))
    sample = replace(sample, true_logprob=q)
    p = {"s": [0.0, math.log(0.8), math.log(0.5), math.log(0.9)]}
    least, most = rejection_bounds([sample], p)
    assert least.value == pytest.approx(1 + 0.6 + 0.6 * 0.5)
    assert most.value == pytest.approx(1 + 0.8 + 0.8 * 0.6)
    shifted = {"s": [*p["s"][1:], 0.0]}
    assert rejection_bounds([sample], shifted)[0].value != pytest.approx(least.value)
    assert rejection_bounds([sample], {})[0].value is None


def test_a_drafter_that_is_the_target_is_never_rejected() -> None:
    sample = hand_records("s", [[R, R, R]] * 6, completion=6)
    p = [-0.3, -0.2, -0.1, -0.5, -0.7, -0.05]
    q = np.array([[p[min(5, a + d + 1)] for d in range(3)] for a in range(6)], dtype=np.float32)
    _, most = rejection_bounds([replace(sample, true_logprob=q)], {"s": p})
    assert most.value == pytest.approx(tau_pooled(request_rows([sample])).value)
