"""Intervals by resampling prompts, against explicit loops and their own promises."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dflash_model.intervals import Estimate, Float64, Ratio, estimate, estimate_mean


def requests(prompts: int, seed: int = 0) -> tuple[Ratio, Ratio]:
    """Paired drafters on the same tokens, lengths log-normal."""
    rng = np.random.default_rng(seed)
    tokens = np.round(np.exp(4 + 0.8 * rng.standard_normal(prompts))) + 8
    reference = np.ceil(tokens / rng.uniform(2, 6, prompts))
    candidate = np.ceil(reference * np.exp(0.08 * rng.standard_normal(prompts)))
    return Ratio(numerator=tokens, denominator=candidate), Ratio(numerator=tokens, denominator=reference)


def left_out_error(statistic: Callable[[list[int]], float], prompts: int) -> float:
    """Jackknife standard error by an explicit loop."""
    values = [statistic([i for i in range(prompts) if i != out]) for out in range(prompts)]
    mean = sum(values) / prompts
    return math.sqrt((prompts - 1) / prompts * sum((value - mean) ** 2 for value in values))


def difference_of(plus: Ratio, minus: Ratio, drawn: list[int]) -> float:
    """The statistic on some prompts."""
    parts = [float(r.numerator[drawn].sum() / r.denominator[drawn].sum()) for r in (plus, minus)]
    return parts[0] - parts[1]


def test_the_standard_error_leaves_out_each_prompt_once() -> None:
    plus, minus = requests(12)
    found = estimate(plus, minus, resamples=50)
    assert found.value == pytest.approx(plus.value - minus.value)
    assert found.standard_error == pytest.approx(left_out_error(lambda drawn: difference_of(plus, minus, drawn), 12))
    alone = estimate(plus, resamples=50)
    assert alone.standard_error == pytest.approx(
        left_out_error(lambda drawn: float(plus.numerator[drawn].sum() / plus.denominator[drawn].sum()), 12)
    )


def test_replicates_are_the_studentised_resamples_of_an_explicit_loop() -> None:
    prompts, resamples, seed = 9, 40, 5
    plus, minus = requests(prompts, seed=2)
    observed = difference_of(plus, minus, list(range(prompts)))
    drawn = np.random.default_rng(seed).integers(0, prompts, (resamples, prompts))
    expected = []
    for sample in drawn.tolist():
        value = difference_of(plus, minus, sample)
        parts = []
        for ratio in (plus, minus):
            a, b = ratio.numerator[sample], ratio.denominator[sample]
            parts.append((a - a.sum() / b.sum() * b) / b.mean())
        influence = parts[0] - parts[1]
        error = math.sqrt(float((influence**2).sum()) / (prompts * (prompts - 1)))
        expected.append(abs(value - observed) / error)
    found = estimate(plus, minus, resamples=resamples, seed=seed)
    np.testing.assert_allclose(found.replicates, sorted(expected), rtol=1e-9)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not() -> None:
    plus, minus = requests(30)
    first, again, other = (estimate(plus, minus, resamples=500, seed=seed).replicates for seed in (1, 1, 2))
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_chunks_do_not_change_the_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    plus, minus = requests(30)
    whole = estimate(plus, minus, resamples=100).replicates
    monkeypatch.setattr("dflash_model.intervals._CELLS_PER_CHUNK", 7 * 30)
    np.testing.assert_allclose(estimate(plus, minus, resamples=100).replicates, whole, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.9, 1.1), st.sampled_from([0.8, 0.9, 0.95, 0.975, 0.99]))
def test_the_p_value_and_the_interval_say_the_same(seed: int, factor: float, level: float) -> None:
    plus, minus = requests(15, seed=seed)
    found = estimate(Ratio(numerator=plus.numerator, denominator=plus.denominator * factor), minus, resamples=399)
    low, high = found.interval(level)
    assert (found.p_value() <= 1 - level + 1e-12) == (low > 0 or high < 0)


def test_an_interval_is_never_narrower_than_students_t() -> None:
    found = Estimate(value=1.0, standard_error=0.5, prompts=11, replicates=np.linspace(0.0, 0.1, 99))
    assert found.half_width(0.95) == pytest.approx(0.5 * stats.t.ppf(0.975, 10))
    wide = Estimate(value=1.0, standard_error=0.5, prompts=11, replicates=np.arange(1.0, 100.0))
    assert wide.half_width(0.95) == 0.5 * 95
    assert wide.half_width(0.99) == 0.5 * 99


def test_a_value_exactly_at_the_border_is_not_significant() -> None:
    """t is 95, and 95 of 99 replicates are at or below it: the 95% interval just touches 0, and p is 6 / 100."""
    found = Estimate(value=47.5, standard_error=0.5, prompts=11, replicates=np.arange(1.0, 100.0))
    assert found.interval(0.95)[0] == 0.0
    assert found.p_value() == 0.06


def test_agreeing_prompts_give_an_interval_of_no_width() -> None:
    """Ten requests of 12 tokens: 4 steps against 6, so tau is 3 against 2 in every one of them."""
    tokens, ours, theirs = (np.full(10, value) for value in (12.0, 4.0, 6.0))
    found = estimate(Ratio(numerator=tokens, denominator=ours), Ratio(numerator=tokens, denominator=theirs))
    assert (found.value, found.interval(), found.p_value()) == (1.0, (1.0, 1.0), 0.0)
    same = Ratio(numerator=tokens, denominator=ours)
    assert (estimate(same, same).interval(), estimate(same, same).p_value()) == ((0.0, 0.0), 1.0)


def test_equal_tau_on_requests_of_any_length_is_not_noise() -> None:
    """tau is 3 in every request, long or short: rounding must not pass for spread."""
    steps = np.array([1.0, 7.0, 33.0, 250.0, 4.0, 19.0])
    assert estimate(Ratio(numerator=3 * steps, denominator=steps)).interval() == (3.0, 3.0)


def test_one_huge_request_makes_the_interval_wide_and_finite() -> None:
    """19 small requests that tie, and one of 100,000 tokens that is twice as fast: nobody can be sure of that."""
    tokens = np.array([10.0] * 19 + [100_000.0])
    theirs, ours = np.array([5.0] * 19 + [50_000.0]), np.array([5.0] * 19 + [25_000.0])
    found = estimate(Ratio(numerator=tokens, denominator=ours), Ratio(numerator=tokens, denominator=theirs))
    low, high = found.interval()
    assert found.value == pytest.approx(2.0, abs=0.01)
    assert -math.inf < low < 0 < high < math.inf


def test_prompts_are_resampled_not_steps() -> None:
    """Ten times the steps in each request tell nothing new; ten times the requests do."""
    plus, minus = requests(20)
    longer = [Ratio(numerator=10 * r.numerator, denominator=10 * r.denominator) for r in (plus, minus)]
    more = [Ratio(numerator=np.tile(r.numerator, 10), denominator=np.tile(r.denominator, 10)) for r in (plus, minus)]
    base = estimate(plus, minus, resamples=999).half_width()
    assert estimate(*longer, resamples=999).half_width() == pytest.approx(base, rel=1e-9)
    assert estimate(*more, resamples=999).half_width() < 0.5 * base


def test_the_mean_has_students_interval() -> None:
    values = np.random.default_rng(0).gamma(2.0, 1.0, 25)
    expected = stats.ttest_1samp(values, 0.0)
    found = estimate_mean(values)
    assert found.interval(0.9) == pytest.approx(tuple(expected.confidence_interval(0.9)))
    assert found.p_value() == pytest.approx(expected.pvalue)
    assert estimate_mean(np.full(5, 0.1)).interval() == (0.1, 0.1)


@pytest.mark.parametrize("prompts", [20, 60])
def test_intervals_hold_the_truth_about_as_often_as_they_say(prompts: int) -> None:
    """400 simulations: a 95% interval misses 20 times, give or take 4.4; a percentile interval at n = 20 misses about 40."""
    rng = np.random.default_rng(9)
    plus, minus = requests(5000, seed=7)
    truth = plus.value - minus.value
    held = 0
    for _ in range(400):
        drawn = rng.integers(0, 5000, prompts)
        ours, theirs = (Ratio(numerator=r.numerator[drawn], denominator=r.denominator[drawn]) for r in (plus, minus))
        low, high = estimate(ours, theirs, resamples=399).interval()
        held += low <= truth <= high
    assert 0.92 <= held / 400 <= 0.98


def test_senseless_input_is_refused() -> None:
    ones: Float64 = np.ones(3)
    with pytest.raises(ValueError, match="not above 0"):
        Ratio(numerator=ones, denominator=np.array([1.0, 0.0, 1.0]))
    with pytest.raises(ValueError, match="shapes"):
        Ratio(numerator=ones, denominator=np.ones(4))
    with pytest.raises(ValueError, match="at least 2"):
        estimate(Ratio(numerator=ones[:1], denominator=ones[:1]))
    with pytest.raises(ValueError, match="the same number"):
        estimate(Ratio(numerator=ones, denominator=ones), Ratio(numerator=np.ones(4), denominator=np.ones(4)))
    with pytest.raises(ValueError, match="at least 2"):
        estimate_mean(ones[:1])
