"""The verdict's lines, one by one, on made-up samples; and what a FAIL says."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dflash_model.errors import NotEvaluable
from dflash_model.target.fidelity import SampleFidelity, Thresholds
from dflash_model.target.fidelity_report import FAIL, PASS, UNEXPLAINED, WARN, judge, require_faithful
from dflash_model.target.layer_checks import LayerCheck
from dflash_model.target.misplacements import Alternative

THRESHOLDS = Thresholds()
GOOD_CHECK = LayerCheck(name="c", passed=True, detail="fine", meaning="m")


def _sample(n: int = 1000, *, miss: int = 0, hard: int = 0, **changes: Any) -> SampleFidelity:
    sample = SampleFidelity(sample_id="a", n=n, agreeing=n - miss, hard=hard, max_gap_nats=0.0, nll_sum_nats=0.5 * n)
    return replace(sample, **changes)


@pytest.mark.parametrize(
    ("miss", "hard", "verdict"),
    [(0, 0, PASS), (30, 0, PASS), (30, 2, PASS), (31, 0, WARN), (30, 3, WARN), (100, 20, WARN), (101, 0, FAIL), (21, 21, FAIL)],
)
def test_the_lines_lie_where_the_thresholds_say(miss: int, hard: int, verdict: str) -> None:
    report = judge([_sample(miss=miss, hard=hard)], thresholds=THRESHOLDS)
    assert report.verdict == verdict
    assert bool(report.reasons) == (verdict != PASS)
    assert (report.agree, report.hard_rate) == (1 - miss / 1000, hard / 1000)


def test_samples_are_pooled_by_token_and_not_by_sample() -> None:
    report = judge(
        [_sample(900, sample_id="big", max_gap_nats=0.1), _sample(100, miss=50, hard=1, max_gap_nats=0.9, first_hard_position=7)],
        thresholds=replace(THRESHOLDS, sample_agree=0.0),
    )
    assert (report.n, report.agree, report.hard_rate) == (1000, 0.95, 0.001)
    assert (report.max_gap_nats, report.mean_nll_nats, report.first_hard) == (0.9, 0.5, ("a", 7))


def test_few_tokens_are_said_and_never_pass() -> None:
    assert judge([_sample(200)], thresholds=THRESHOLDS).verdict == PASS
    report = judge([_sample(199)], thresholds=THRESHOLDS)
    assert report.verdict == WARN
    assert report.reasons == ("Only 199 completion tokens were compared; below 200 a handful decides the verdict.",)


def test_no_token_at_all_fails() -> None:
    for samples in ([], [_sample(0, max_gap_nats=None)]):
        report = judge(samples, thresholds=THRESHOLDS)
        assert (report.verdict, report.agree, report.mean_nll_nats) == (FAIL, None, None)


def test_one_bad_sample_fails_a_good_pool_unless_it_is_too_short_to_tell() -> None:
    good = _sample(5000)
    assert judge([good, _sample(40, miss=11, hard=2)], thresholds=THRESHOLDS).verdict == FAIL
    assert judge([good, _sample(40, miss=10, hard=2)], thresholds=THRESHOLDS).verdict == PASS
    assert judge([good, _sample(40, miss=11, hard=0)], thresholds=THRESHOLDS).verdict == PASS
    assert judge([good, _sample(15, miss=15, hard=10)], thresholds=THRESHOLDS).verdict == PASS


def test_a_fault_or_a_failed_check_fails_whatever_the_figures() -> None:
    fault = _sample(faults={"zero_rows": "The states of a hold 3 all-zero rows, first row 0."})
    report = judge([fault], thresholds=THRESHOLDS)
    assert (report.verdict, report.causes[0].name) == (FAIL, "zero_rows")
    bad = replace(GOOD_CHECK, name="two chunks equal one pass", passed=False, detail="off by 0.3", meaning="State is lost.")
    report = judge([_sample()], thresholds=THRESHOLDS, checks=[GOOD_CHECK, bad])
    assert (report.verdict, report.reasons) == (FAIL, ("two chunks equal one pass: off by 0.3",))
    assert [(cause.name, cause.sentence) for cause in report.causes] == [("two chunks equal one pass", "State is lost.")]
    assert judge([_sample()], thresholds=THRESHOLDS, checks=[GOOD_CHECK]).verdict == PASS


def test_log_probability_differences_warn_and_then_fail() -> None:
    def verdict(*deltas: float) -> str:
        return judge([_sample(deltas_nats=deltas)], thresholds=THRESHOLDS).verdict

    assert verdict(*[0.02] * 100) == PASS
    assert verdict(*[0.03] * 100) == WARN
    assert verdict(*[0.51] * 100) == FAIL
    assert verdict(*[0.0] * 99, 9.0) == PASS
    assert verdict(*[0.0] * 98, 9.0, 9.0) == WARN


def test_the_99th_percentile_is_the_nearest_rank() -> None:
    report = judge([_sample(deltas_nats=tuple(i / 1000 for i in range(1, 101)))], thresholds=THRESHOLDS)
    assert report.delta_median_nats == pytest.approx(0.0505)
    assert report.delta_p99_nats == 0.099
    assert judge([_sample()], thresholds=THRESHOLDS).delta_median_nats is None


@pytest.mark.parametrize(
    ("kernels", "dtype", "verdict"),
    [
        ({}, "bfloat16", PASS),
        ({"chunk": "fla.ops"}, "bfloat16", PASS),
        ({"chunk": "torch"}, "float32", PASS),
        ({"chunk": "torch"}, "bfloat16", WARN),
        ({"chunk": "unknown"}, "float32", WARN),
    ],
)
def test_fallback_and_unknown_kernels_warn(kernels: dict[str, str], dtype: str, verdict: str) -> None:
    assert judge([_sample()], thresholds=THRESHOLDS, backend={"kernels": kernels, "dtype": dtype}).verdict == verdict


def _suspect(**alternatives: tuple[int, float]) -> SampleFidelity:
    tried = {name: Alternative(agreeing=agreeing, delta_sum_nats=delta) for name, (agreeing, delta) in alternatives.items()}
    return _sample(100, miss=80, hard=80, alternatives=tried, deltas_nats=(5.0,) * 100)


def test_causes_are_ranked_by_what_they_explain() -> None:
    report = judge(
        [_suspect(rows_shifted_later=(95, 9.0), rows_shifted_earlier=(99, 1.0), norm_applied_twice=(50, 0.1))],
        thresholds=THRESHOLDS,
    )
    assert [(cause.name, cause.agree) for cause in report.causes] == [
        ("rows_shifted_earlier", 0.99),
        ("rows_shifted_later", 0.95),
    ]


def test_where_nothing_explains_it_that_is_said() -> None:
    report = judge([_suspect(rows_shifted_later=(30, 300.0), other_norm_form=(20, 499.0))], thresholds=THRESHOLDS)
    assert [cause.name for cause in report.causes] == [UNEXPLAINED]
    assert judge([_sample()], thresholds=THRESHOLDS).causes == ()


def test_a_fail_is_not_evaluable_and_names_reason_and_cause() -> None:
    require_faithful(judge([_sample(miss=31)], thresholds=THRESHOLDS))
    with pytest.raises(NotEvaluable) as caught:
        require_faithful(judge([_suspect(rows_shifted_later=(99, 1.0))], thresholds=THRESHOLDS))
    assert "Only 20.0% of 100 tokens agree" in caught.value.problem
    assert "Further reasons in the log: 5." in caught.value.problem
    assert caught.value.fix == "Likely cause: Each row is one place late: row i holds the state after token i - 1."


def test_the_report_is_json_without_per_token_lists() -> None:
    report = judge([_sample(deltas_nats=(0.0,) * 1000)], thresholds=THRESHOLDS, checks=[GOOD_CHECK])
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (data["verdict"], data["n"], data["samples"][0]["sample_id"], data["checks"][0]["passed"]) == (PASS, 1000, "a", True)
    assert "deltas_nats" not in data["samples"][0]
    assert data["thresholds"]["pass_agree"] == 0.97


def test_samples_that_the_gate_could_not_look_at_are_counted() -> None:
    report = judge([_sample(), _sample(0, max_gap_nats=None, sample_id="b")], thresholds=THRESHOLDS)
    assert report.verdict == WARN
    assert report.reasons == ("The gate could not look at 1 of 2 samples: the engine did not deliver the last layer.",)


def test_kernels_are_blamed_where_nothing_else_explains_it() -> None:
    backend = {"kernels": {"chunk": "torch"}, "dtype": "float32"}
    report = judge([_suspect(rows_shifted_later=(30, 300.0))], thresholds=THRESHOLDS, backend=backend)
    assert [cause.name for cause in report.causes] == ["linear_attention_kernels", UNEXPLAINED]
    assert "chunk by torch" in report.causes[0].sentence
    explained = judge([_suspect(rows_shifted_later=(99, 1.0))], thresholds=THRESHOLDS, backend=backend)
    assert [cause.name for cause in explained.causes] == ["rows_shifted_later"]


def test_an_explanation_counts_on_the_samples_that_tried_it() -> None:
    tried = _suspect(other_prompt_template=(99, 1.0))
    report = judge(
        [tried, replace(tried, alternatives={"rows_shifted_later": Alternative(agreeing=20, delta_sum_nats=9e9)})],
        thresholds=THRESHOLDS,
    )
    assert [(cause.name, cause.agree) for cause in report.causes] == [("other_prompt_template", 0.99)]
