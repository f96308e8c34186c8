"""The word, the sentence and the prompts still needed, from numbers worked out by hand."""

from dataclasses import replace

import pytest

from dflash_model.verdict import BETTER, EQUAL, NO_VERDICT, UNDECIDED, WORSE, Difference, Spread, judge

NAMES = ("step-220", "release")


def difference(
    value: float, half: float, *, p_value: float, margin: float = 0.1, prompts: int = 40, candidates: int = 1
) -> Difference:
    """tau 5 + value against 5, with a plain interval of +- half and the same one for the family."""
    spread = Spread(
        interval=(value - half, value + half),
        family_half_width=half,
        per_request_interval=(value - half, value + half),
        p_value=p_value,
        error_rate=0.05,
        candidates=candidates,
    )
    return Difference(
        prompts=prompts, candidate_tau=5 + value, reference_tau=5.0, per_request=value, equal_within=margin, spread=spread
    )


@pytest.mark.parametrize(
    ("value", "half", "p_value", "word"),
    [
        (0.5, 0.2, 0.001, BETTER),
        (-0.5, 0.2, 0.001, WORSE),
        (0.5, 0.2, 0.05, BETTER),
        (0.5, 0.6, 0.11, UNDECIDED),
        (0.02, 0.07, 0.6, EQUAL),
        (0.02, 0.09, 0.7, UNDECIDED),
        (0.06, 0.03, 0.001, EQUAL),
        (-0.06, 0.03, 0.001, EQUAL),
        (0.08, 0.03, 0.001, BETTER),
    ],
)
def test_the_word_follows_interval_margin_and_p(value: float, half: float, p_value: float, word: str) -> None:
    assert judge(difference(value, half, p_value=p_value), names=NAMES, min_prompts=10).word == word


@pytest.mark.parametrize(
    ("value", "half", "further"),
    [
        (0.1, 0.3, 320),  # 40 ((0.3 / 0.1)^2 - 1): until 0 is out
        (0.01, 0.2, 158),  # 40 ((0.2 / 0.09)^2 - 1) = 157.5: until it fits into the margin, which comes first
        (0.0, 0.2, 120),  # 40 ((0.2 / 0.1)^2 - 1)
        (0.1, 0.1001, 1),
    ],
)
def test_an_undecided_verdict_says_how_many_prompts_would_decide(value: float, half: float, further: int) -> None:
    verdict = judge(difference(value, half, p_value=0.5), names=NAMES, min_prompts=10)
    assert verdict.word == UNDECIDED
    assert verdict.further_prompts == further
    plural = "" if further == 1 else "s"
    assert f"About {further} further prompt{plural} like these would decide." in verdict.sentence


def test_with_no_margin_and_no_difference_no_number_of_prompts_decides() -> None:
    verdict = judge(difference(0.0, 0.2, p_value=1.0, margin=0.0), names=NAMES, min_prompts=10)
    assert (verdict.word, verdict.further_prompts) == (UNDECIDED, None)
    assert "further" not in verdict.sentence


def test_the_sentence_names_both_taus_the_interval_and_the_prompts() -> None:
    assert judge(difference(0.5, 0.2, p_value=0.001), names=NAMES, min_prompts=10).sentence == (
        "step-220 is better than release: pooled tau 5.50 against 5.00, +0.50 [+0.30, +0.70] or +10.0% on 40 prompts."
    )
    assert judge(difference(0.02, 0.07, p_value=0.6), names=NAMES, min_prompts=10).sentence == (
        "step-220 equals release within 2%: pooled tau 5.02 against 5.00, +0.02 [-0.05, +0.09] or +0.4% on 40 prompts."
    )


def test_a_certain_but_small_difference_is_said_to_be_both() -> None:
    sentence = judge(difference(0.06, 0.03, p_value=0.001), names=NAMES, min_prompts=10).sentence
    assert "equals release within 2%" in sentence
    assert "There is a difference, but it is too small to matter." in sentence


def test_a_difference_that_only_the_correction_undoes_is_explained() -> None:
    one = judge(difference(0.5, 0.45, p_value=0.09, candidates=3), names=NAMES, min_prompts=10)
    assert one.word == UNDECIDED
    assert "Its own interval leaves 0 out, but Holm's correction for 3 candidates gives p = 0.09." in one.sentence


def test_opposite_directions_are_said_in_a_sentence() -> None:
    found = replace(difference(0.5, 0.2, p_value=0.001), per_request=-0.12)
    assert found.sign_disagreement
    assert "The mean over requests points the other way (-0.12)" in judge(found, names=NAMES, min_prompts=10).sentence
    assert not difference(0.5, 0.2, p_value=0.001).sign_disagreement
    assert not replace(found, per_request=0.0).sign_disagreement


def test_too_few_prompts_give_no_verdict_but_the_raw_difference() -> None:
    few = replace(difference(0.5, 0.2, p_value=0.001, prompts=4), spread=None)
    verdict = judge(few, names=NAMES, min_prompts=10)
    assert (verdict.word, verdict.further_prompts) == (NO_VERDICT, None)
    assert verdict.sentence == (
        "No verdict on step-220: 4 prompts have a verify step, and an interval needs 10. So far: +0.50 in pooled tau."
    )
    assert "1 prompt has" in judge(replace(few, prompts=1), names=NAMES, min_prompts=10).sentence


def test_not_one_prompt_with_a_step_gives_no_verdict() -> None:
    verdict = judge(None, names=NAMES, min_prompts=10)
    assert verdict.word == NO_VERDICT
    assert verdict.sentence == "No verdict on step-220: 0 prompts have a verify step, and an interval needs 10."
