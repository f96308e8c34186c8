"""Drafters against a reference on paired requests, with numbers worked out by hand."""

import numpy as np
import pytest

from dflash_model.comparison import Rules, compare, holm, tau_of
from dflash_model.intervals import Ratio, estimate
from dflash_model.metrics import RequestRow
from dflash_model.verdict import BETTER, EQUAL, NO_VERDICT, UNDECIDED, WORSE

FEW = Rules(min_prompts=2)


def row(sample_id: str, steps: int, tokens: int) -> RequestRow:
    """A request whose first step earned all that the others did not."""
    earned = (tokens - steps + 1, *[1] * (steps - 1)) if steps else ()
    return RequestRow(sample_id=sample_id, category=None, anchors=tuple(range(steps)), step_tokens=earned)


def rows(*pairs: tuple[int, int]) -> list[RequestRow]:
    """Requests "0", "1", .. of (steps, tokens)."""
    return [row(str(index), steps, tokens) for index, (steps, tokens) in enumerate(pairs)]


def noisy(prompts: int, *, advantage: float, seed: int = 0, scatter: float = 0.05) -> tuple[list[RequestRow], list[RequestRow]]:
    """Candidate and reference of about 60 steps and tau 2 to 6 a request; the candidate needs fewer steps by `advantage`."""
    rng = np.random.default_rng(seed)
    reference = rng.integers(40, 80, prompts)
    candidate = np.round(reference / (1 + advantage) * np.exp(scatter * rng.standard_normal(prompts))).astype(int)
    tokens = np.round(reference * rng.uniform(2, 6, prompts)).astype(int)
    return rows(*zip(candidate.tolist(), tokens.tolist(), strict=True)), rows(
        *zip(reference.tolist(), tokens.tolist(), strict=True)
    )


def test_pooled_tau_can_rise_while_the_mean_over_requests_falls() -> None:
    """Reference: 60 tokens in 10 steps, 20 in 10: pooled 80 / 20 = 4, mean (6 + 2) / 2 = 4.
    Candidate: the same in 11 and 8: pooled 80 / 19 = 4.21, mean (60 / 11 + 20 / 8) / 2 = 3.98."""
    reference, candidate = rows((10, 60), (10, 20)), rows((11, 60), (8, 20))
    found = compare({"new": candidate}, reference, reference_name="old", rules=FEW)["new"].difference
    assert found is not None
    assert (found.candidate_tau, found.reference_tau) == (80 / 19, 4.0)
    assert found.value == pytest.approx(4 / 19)
    assert found.per_request == pytest.approx((60 / 11 - 6 + 20 / 8 - 2) / 2)
    assert found.per_request < 0 < found.value
    assert found.sign_disagreement


def test_better_worse_equal_and_undecided() -> None:
    for advantage, scatter, word in ((0.08, 0.05, BETTER), (-0.08, 0.05, WORSE), (0.0, 0.02, EQUAL), (0.03, 0.2, UNDECIDED)):
        candidate, reference = noisy(60, advantage=advantage, scatter=scatter)
        assert compare({"new": candidate}, reference, reference_name="old", rules=Rules())["new"].verdict.word == word


def test_equal_needs_the_margin() -> None:
    candidate, reference = noisy(60, advantage=0.0, scatter=0.02)
    strict = compare({"new": candidate}, reference, reference_name="old", rules=Rules(equal_within=0.0))["new"]
    assert strict.verdict.word == UNDECIDED


def test_the_drafter_compared_with_itself_is_equal_at_any_margin() -> None:
    _, reference = noisy(20, advantage=0.0)
    found = compare({"same": reference}, reference, reference_name="old", rules=Rules(equal_within=0.0))["same"]
    assert found.verdict.word == EQUAL
    assert found.difference is not None
    assert found.difference.value == 0
    assert found.difference.spread is not None
    assert found.difference.spread.interval == (0.0, 0.0)


def test_a_constant_gain_without_spread_is_better() -> None:
    """12 tokens in 4 steps against 6, in each of ten requests: +1 for certain."""
    candidate, reference = rows(*[(4, 12)] * 10), rows(*[(6, 12)] * 10)
    found = compare({"new": candidate}, reference, reference_name="old", rules=Rules())["new"]
    assert found.verdict.word == BETTER
    assert found.verdict.sentence.startswith(
        "new is better than old: pooled tau 3.00 against 2.00, +1.00 [+1.00, +1.00] or +50.0%"
    )


@pytest.mark.parametrize("prompts", [1, 9])
def test_fewer_prompts_than_the_rules_want_give_no_interval(prompts: int) -> None:
    candidate, reference = noisy(prompts, advantage=0.5)
    found = compare({"new": candidate}, reference, reference_name="old", rules=Rules())["new"]
    assert found.verdict.word == NO_VERDICT
    assert found.difference is not None
    assert found.difference.prompts == prompts
    assert found.difference.spread is None
    alone = tau_of(candidate, rules=Rules())
    assert alone.pooled is not None
    assert (alone.interval, alone.per_request_interval) == (None, None)


def test_requests_without_a_step_are_no_pairs() -> None:
    found = compare({"new": rows((0, 0), (4, 12))}, rows((0, 0), (6, 12)), reference_name="old", rules=Rules())["new"]
    assert found.difference is not None
    assert (found.difference.prompts, found.difference.value, found.difference.per_request) == (1, 1.0, 1.0)
    nothing = compare({"new": rows((0, 0))}, rows((0, 0)), reference_name="old", rules=Rules())["new"]
    assert (nothing.difference, nothing.verdict.word) == (None, NO_VERDICT)


def test_pairing_by_prompt_is_what_makes_the_interval_narrow() -> None:
    candidate, reference = noisy(40, advantage=0.05)
    paired = compare({"new": candidate}, reference, reference_name="old", rules=Rules())["new"].difference
    assert paired is not None
    assert paired.spread is not None
    order = np.random.default_rng(1).permutation(40).tolist()
    shuffled = [row(str(place), reference[i].steps, reference[i].tokens) for place, i in enumerate(order)]
    unpaired = compare({"new": candidate}, shuffled, reference_name="old", rules=Rules())["new"].difference
    assert unpaired is not None
    assert unpaired.spread is not None
    assert unpaired.value == pytest.approx(paired.value)
    assert paired.spread.family_half_width < 0.5 * unpaired.spread.family_half_width


def test_rows_of_other_prompts_or_another_order_are_refused() -> None:
    with pytest.raises(ValueError, match="another order"):
        compare({"new": rows((4, 12), (5, 12))[::-1]}, rows((4, 12), (5, 12)), reference_name="old", rules=Rules())


def test_holms_adjusted_p_values_by_hand() -> None:
    """Sorted 0.01, 0.03, 0.04 times 3, 2, 1, never falling: 0.03, 0.06, 0.06."""
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == {"a": 0.03, "c": 0.06, "b": 0.06}
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


def test_more_candidates_take_a_verdict_that_hangs_by_a_thread() -> None:
    """p of `thread` alone is between 0.017 and 0.05: better alone, undecided among three."""
    thread, reference = noisy(40, advantage=0.026, scatter=0.07, seed=1)
    rng = np.random.default_rng(8)
    others = {}
    for name in ("x", "y"):
        steps = [max(1, round(r.steps * float(np.exp(0.07 * rng.standard_normal())))) for r in reference]
        others[name] = [row(r.sample_id, count, r.tokens) for r, count in zip(reference, steps, strict=True)]
    alone = compare({"thread": thread}, reference, reference_name="old", rules=Rules(equal_within=0.0))["thread"]
    among = compare({"thread": thread, **others}, reference, reference_name="old", rules=Rules(equal_within=0.0))["thread"]
    assert alone.difference is not None
    assert among.difference is not None
    assert alone.difference.spread is not None
    assert among.difference.spread is not None
    assert 0.05 / 3 < alone.difference.spread.p_value <= 0.05
    assert alone.verdict.word == BETTER
    assert among.difference.spread.interval == alone.difference.spread.interval
    assert among.difference.spread.candidates == 3
    assert among.verdict.word == UNDECIDED
    assert "Holm's correction for 3 candidates" in among.verdict.sentence


def test_more_candidates_also_take_an_equality_that_hangs_by_a_thread() -> None:
    """The plain interval lies within the margin, the one at Bonferroni's level for three does not."""
    thread, reference = noisy(60, advantage=0.0, scatter=0.02)
    alone = compare({"thread": thread}, reference, reference_name="old", rules=Rules())["thread"].difference
    assert alone is not None
    assert alone.spread is not None
    just = (abs(alone.value) + alone.spread.family_half_width) / alone.reference_tau * 1.001
    rules = Rules(equal_within=just)
    words = [
        compare(named, reference, reference_name="old", rules=rules)["thread"].verdict.word
        for named in ({"thread": thread}, {"thread": thread, "x": reference, "y": reference})
    ]
    assert words == [EQUAL, UNDECIDED]


def test_a_drafters_own_tau_and_interval() -> None:
    candidate, _ = noisy(30, advantage=0.0)
    found = tau_of([*candidate, row("none", 0, 0)], rules=Rules())
    tokens = np.array([r.tokens for r in candidate], dtype=np.float64)
    steps = np.array([r.steps for r in candidate], dtype=np.float64)
    assert found.pooled == tokens.sum() / steps.sum()
    assert found.per_request == pytest.approx((tokens / steps).mean())
    assert found.interval == estimate(Ratio(numerator=tokens, denominator=steps)).interval()
    assert (found.requests, found.requests_without_steps, found.steps) == (31, 1, steps.sum())


def test_rules_out_of_range_are_refused() -> None:
    for wrong in ({"level": 1.0}, {"level": 0.2}, {"equal_within": -0.1}, {"min_prompts": 1}, {"resamples": 0}):
        with pytest.raises(ValueError, match="out of range"):
            Rules(**wrong)  # type: ignore[arg-type]
