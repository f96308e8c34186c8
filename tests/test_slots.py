"""Per-slot acceptance with requests that end inside a block, worked out by hand."""

import pytest

from dflash_model.metrics import request_rows, tau_pooled
from dflash_model.replay.walk import TRUNCATED, ZLAB
from dflash_model.slots import SlotRates, slot_effects, slot_rates
from tests.made_up_records import hand_records, made_up_records

RIGHT, WRONG = 0, 9


def slot(number: int, reached: int, accepted: int) -> SlotRates:
    """A slot whose conditional rate is accepted / reached."""
    return SlotRates(slot=number, reached=reached, accepted=accepted, observed=reached, correct=accepted, survival=None)


def test_without_cut_steps_survival_is_the_share_of_steps() -> None:
    """Four steps that accept 2, 0, 1 and 0 drafts; the completion goes on past every block."""
    ranks = [[WRONG] * 3 for _ in range(12)]
    ranks[0], ranks[4] = [RIGHT, RIGHT, WRONG], [RIGHT, WRONG, RIGHT]
    sample = hand_records("long", ranks, completion=8, overshoot=9)
    rates = slot_rates([sample], tail=ZLAB)
    assert request_rows([sample], tail=ZLAB)[0].step_tokens == (3, 1, 2, 1)
    assert [(rate.reached, rate.accepted) for rate in rates] == [(4, 2), (2, 1), (1, 0)]
    assert [rate.survival for rate in rates] == [2 / 4, 1 / 4, 0.0]
    assert [rate.conditional for rate in rates] == [2 / 4, 1 / 2, 0.0]
    assert [rate.accuracy for rate in rates] == [2 / 4, 1 / 4, 1 / 4]
    assert 1 + sum(rate.survival or 0 for rate in rates) == tau_pooled(request_rows([sample], tail=ZLAB)).value


def test_a_slot_past_the_end_counts_neither_way() -> None:
    """Positions 2..7. Anchor 2 accepts 3 drafts and goes to 6; anchor 6 sees slot 1 (position 7, right) and no more.

    Slot 2 was observed once and accepted once: 1. Counting the cut step as refused would say 1/2.
    """
    sample = hand_records("cut", [[RIGHT] * 3, *[[WRONG] * 3] * 3, [RIGHT, RIGHT, RIGHT], [WRONG] * 3], completion=6, overshoot=3)
    cut = slot_rates([sample], tail=TRUNCATED)
    assert [(rate.observed, rate.reached, rate.accepted) for rate in cut] == [(2, 2, 2), (1, 1, 1), (1, 1, 1)]
    assert [rate.survival for rate in cut] == [1.0, 1.0, 1.0]
    full = slot_rates([sample], tail=ZLAB)
    assert [rate.observed for rate in full] == [2, 2, 2]


def test_survival_never_rises_where_the_share_of_observed_steps_would() -> None:
    """Anchor 2 accepts everything; anchor 6 refuses slot 1 and cannot see slot 2: its refusal still counts against slot 2."""
    sample = hand_records("refused", [[RIGHT] * 3, *[[WRONG] * 3] * 5], completion=6)
    rates = slot_rates([sample])
    assert [rate.survival for rate in rates] == [0.5, 0.5, 0.5]
    naive = [rate.accepted / rate.observed for rate in rates]
    assert naive == [0.5, 1.0, 1.0]


def test_a_slot_that_no_step_could_observe_is_unknown() -> None:
    """A completion of 3 tokens: the only step observes slots 1 and 2."""
    rates = slot_rates([hand_records("short", [[RIGHT] * 3] * 3, completion=3)])
    assert [rate.survival for rate in rates] == [1.0, 1.0, None]
    assert (rates[2].conditional, rates[2].accuracy) == (None, None)


def test_past_a_survival_of_zero_every_slot_is_zero_and_its_condition_unknown() -> None:
    rates = slot_rates([hand_records("bad", [[WRONG] * 3] * 6, completion=6)])
    assert [rate.survival for rate in rates] == [0.0, 0.0, 0.0]
    assert [rate.conditional for rate in rates] == [0.0, None, None]


def test_only_the_chains_own_anchors_count() -> None:
    """Anchor 3 lies inside the first accepted block; its right slots must not be seen."""
    ranks = [[RIGHT, WRONG, WRONG], [RIGHT] * 3, [WRONG] * 3, [WRONG] * 3, [WRONG] * 3, [WRONG] * 3]
    rates = slot_rates([hand_records("visited", ranks, completion=6)])
    assert [(rate.observed, rate.correct) for rate in rates] == [(4, 1), (3, 0), (2, 0)]


def test_requests_without_steps_have_no_slots() -> None:
    assert slot_rates([hand_records("empty", [], completion=0)]) == []
    assert slot_rates([]) == []


def test_survival_of_many_uncut_steps_adds_up_to_tau() -> None:
    samples = made_up_records(2, sharpness=3.2, late=0.25, prompts=8)
    rates = slot_rates(samples, tail=ZLAB)
    tau = tau_pooled(request_rows(samples, tail=ZLAB)).value
    assert 1 + sum(rate.survival or 0 for rate in rates) == pytest.approx(tau, rel=1e-12)


def test_slot_effects_swap_one_conditional_rate_at_a_time() -> None:
    """Reference 0.8, 0.5: 1 + 0.8 + 0.4. With 0.4 at slot 1: 1 + 0.4 + 0.2; with 1.0 at slot 2: 1 + 0.8 + 0.8."""
    reference = [slot(1, 10, 8), slot(2, 8, 4)]
    candidate = [slot(1, 10, 4), slot(2, 4, 4)]
    assert slot_effects(candidate, reference) == pytest.approx([-0.6, 0.4])


def test_slot_effects_are_unknown_where_a_rate_is() -> None:
    reference = [slot(1, 10, 8), slot(2, 8, 4), slot(3, 0, 0)]
    assert slot_effects([slot(1, 10, 8), slot(2, 0, 0)], reference) == [pytest.approx(0.0), None]
    assert slot_effects([slot(1, 10, 8), slot(2, 8, 4), slot(3, 4, 2)], reference)[2] is None
