"""Attribution: parts worked out by hand, that add up to the gap, and what the sentence says of them."""

import pytest

from dflash_model.attribution import Part, attribution_sentence, category_parts, slot_parts, where_most
from dflash_model.metrics import RequestRow, tau_pooled
from dflash_model.slots import SlotRates, slot_rates
from tests.made_up_records import made_up_records


def slot(number: int, reached: int, accepted: int) -> SlotRates:
    return SlotRates(slot=number, reached=reached, accepted=accepted, observed=reached, correct=accepted, survival=None)


def row(name: str, category: str | None, *steps: int) -> RequestRow:
    return RequestRow(sample_id=name, category=category, anchors=tuple(range(len(steps))), step_tokens=steps)


def test_slot_parts_by_hand() -> None:
    """Reference .8, .5 (1 + .8 + .4 = 2.2), candidate .4, 1.0 (1 + .4 + .4 = 1.8): the gap is -.4.

    Slot 1 first: -.4 * (1 + .5) = -.6, then slot 2 at the candidate's .4: .4 * .5 = +.2.
    Slot 2 first: at the reference's .8: .8 * .5 = +.4, then slot 1: -.4 * (1 + 1) = -.8. Means: -.7 and +.3.
    """
    parts = slot_parts([slot(1, 10, 4), slot(2, 4, 4)], [slot(1, 10, 8), slot(2, 8, 4)])
    assert [part.tokens for part in parts] == pytest.approx([-0.7, 0.3])
    assert [part.share for part in parts] == pytest.approx([1.75, -0.75])


def test_slot_parts_add_up_to_the_gap_of_uncut_steps() -> None:
    ours = slot_rates(made_up_records(1, sharpness=3.2, late=0.3, prompts=9))
    theirs = slot_rates(made_up_records(2, sharpness=3.5, late=0.2, prompts=9))
    gap = sum(rate.survival or 0 for rate in ours) - sum(rate.survival or 0 for rate in theirs)
    assert sum(part.tokens for part in slot_parts(ours, theirs)) == pytest.approx(gap, rel=1e-9)
    assert abs(gap) > 0.3


def test_a_rate_never_shown_is_the_others_and_a_slot_not_there_is_refused() -> None:
    """The candidate refuses slot 1 always, so its slot 2 is unknown: all is lost at slot 1."""
    parts = slot_parts([slot(1, 10, 0), slot(2, 0, 0)], [slot(1, 10, 8), slot(2, 8, 4)])
    assert [part.tokens for part in parts] == pytest.approx([-1.2, 0.0])
    shorter = slot_parts([slot(1, 10, 8)], [slot(1, 10, 8), slot(2, 8, 4)])
    assert [part.tokens for part in shorter] == pytest.approx([0.0, -0.4])


def test_category_parts_by_hand_add_up_to_the_gap_in_pooled_tau() -> None:
    """Reference: code 8 tokens in 2 steps, math 4 in 2 (tau 3). Candidate: code 8 in 4, math 4 in 2 (tau 2).

    Mean tau 2.5, mean steps 5. Code: (0 - 2.5 * 2) / 5 = -1. Math: 0.
    """
    reference = [row("a", "code", 4, 4), row("b", "math", 2, 2)]
    candidate = [row("a", "code", 2, 2, 2, 2), row("b", "math", 2, 2)]
    assert category_parts(candidate, reference) == [
        Part(name="code", tokens=-1.0, share=1.0),
        Part(name="math", tokens=0.0, share=-0.0),
    ]
    moved = [row("a", "code", 3, 5, 4), row("b", None, 1, 1, 1)]
    gap = (tau_pooled(moved).value or 0) - (tau_pooled(reference).value or 0)
    parts = category_parts(moved, [reference[0], row("b", None, 2, 2)])
    assert [part.name for part in parts] == ["code", "without category"]
    assert sum(part.tokens for part in parts) == pytest.approx(gap)
    assert category_parts([row("a", "code")], reference) == []


def test_the_shortest_run_with_most_of_the_gap_is_named() -> None:
    parts = [Part(name=str(i), tokens=-share, share=share) for i, share in enumerate((0.4, 0.31, 0.2, 0.09), start=1)]
    assert where_most(parts) == (1, 2, pytest.approx(0.71))
    categories = [Part(name="code", tokens=-0.54, share=0.54), Part(name="math", tokens=-0.46, share=0.46)]
    assert attribution_sentence(parts, categories) == "71% of the loss at slots 1-2; 54% in code (-0.54)."
    late = [Part(name=str(i), tokens=share, share=share) for i, share in enumerate((0.1, 0.2, 0.7), start=1)]
    assert attribution_sentence(late, categories[:1]) == "70% of the gain at slot 3."


def test_without_a_gap_nothing_is_said() -> None:
    same = [slot(1, 10, 8), slot(2, 8, 4)]
    parts = slot_parts(same, same)
    assert [(part.tokens, part.share) for part in parts] == [(0.0, None), (0.0, None)]
    assert attribution_sentence(parts, []) == ""
    assert attribution_sentence([], []) == ""
