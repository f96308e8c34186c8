"""The gate: which rule turns a night red, on numbers worked out from the requests."""

from typing import Any

import pytest

from dflash_model.gate import Best, GateOutcome, GateRules, compare_results, judge_gate
from tests.made_up_evaluations import checkpoint_records, made_up_evaluation, step_evaluation

GREEN = GateOutcome(regressed=(), not_applied=())


GOOD, BAD = step_evaluation(30), step_evaluation(10)


def loss_in_percent(result: dict[str, Any]) -> float:
    """What the candidate loses against the reference, from the requests alone."""
    reference, candidate = (
        sum(row["tokens"] for row in entry["requests"]) / sum(row["steps"] for row in entry["requests"])
        for entry in result["drafters"]
    )
    return 100 * (reference - candidate) / reference


def test_without_rules_everything_is_green() -> None:
    assert not GateRules().any
    assert judge_gate(BAD, GateRules(), {}) == GREEN


def test_worse_than_the_reference_by_more_than_the_margin_is_red_and_by_less_is_not() -> None:
    loss = loss_in_percent(BAD)
    assert BAD["drafters"][1]["vs_reference"]["verdict"] == "worse"
    under, over = (GateRules(worse_than_reference=(loss + change) / 100) for change in (-1, 1))
    (reason,) = judge_gate(BAD, under, {}).regressed
    said = float(reason.partition("worse than release by ")[2].partition("%")[0])
    assert said == pytest.approx(loss, abs=0.051)
    assert judge_gate(BAD, over, {}) == GREEN
    assert judge_gate(GOOD, GateRules(worse_than_reference=0.0), {}) == GREEN


def test_a_loss_that_is_not_sure_is_not_red() -> None:
    result = step_evaluation(20)
    against = result["drafters"][1]["vs_reference"]
    assert against["verdict"] == "undecided"
    assert against["difference"] < 0
    assert judge_gate(result, GateRules(worse_than_reference=0.0), {}) == GREEN


def test_worse_than_the_best_so_far_is_judged_on_the_shared_prompts() -> None:
    best = {"step-00010": Best(run_id="night-7", name="step-00030", result=GOOD)}
    (reason,) = judge_gate(BAD, GateRules(worse_than_best=0.01), best).regressed
    assert reason.startswith("step-00010 is worse than step-00030 of night-7 by ")
    turned = {"step-00030": Best(run_id="night-1", name="step-00010", result=BAD)}
    assert judge_gate(GOOD, GateRules(worse_than_best=0.01), turned) == GREEN


def test_the_floor_is_asked_of_every_candidate_and_not_of_the_reference() -> None:
    tau = BAD["drafters"][1]["tau"]["pooled"]
    assert judge_gate(BAD, GateRules(min_tau=tau), {}) == GREEN
    assert judge_gate(BAD, GateRules(min_tau=tau + 0.01), {}).regressed == (
        f"step-00010 has tau {tau:.2f}, below the floor {tau + 0.01:g}.",
    )


@pytest.mark.parametrize(("verdict", "red"), [("PASS", False), ("WARN", True), ("-", True)])
def test_fidelity_must_be_pass(verdict: str, red: bool) -> None:
    assert bool(judge_gate(step_evaluation(30, fidelity=verdict), GateRules(fidelity_pass=True), {}).regressed) is red


def test_what_cannot_be_judged_is_said_and_is_not_red() -> None:
    few = made_up_evaluation({"new": checkpoint_records(10, prompts=5)}, reference=None)
    outcome = judge_gate(few, GateRules(worse_than_reference=0.0, worse_than_best=0.0), {})
    assert outcome.regressed == ()
    assert outcome.not_applied == (
        "new has no reference to be held against.",
        "There is no earlier checkpoint of new's training run to hold it against.",
    )
    held = {"new": Best(run_id="night-1", name="step-00030", result=GOOD)}
    too_few = judge_gate(few, GateRules(worse_than_best=0.0), held)
    assert too_few.regressed == ()
    assert too_few.not_applied == ("new has too few prompts for a verdict against step-00030 of night-1.",)


def test_two_results_compare_over_the_prompts_that_both_have() -> None:
    short = made_up_evaluation({"step-00010": checkpoint_records(10)[:11]}, reference=None)
    compared = compare_results(short, "step-00010", GOOD, "step-00030")
    assert compared.difference is not None
    assert compared.difference.prompts == 11
    rows = [
        [row for row in result["drafters"][index]["requests"] if row["sample_id"] != "math-011"]
        for result, index in ((short, 0), (GOOD, 1))
    ]
    ours, theirs = (sum(r["tokens"] for r in part) / sum(r["steps"] for r in part) for part in rows)
    assert len(rows[0]) == len(rows[1]) == 11
    assert compared.difference.value == pytest.approx(ours - theirs)


def test_a_drafter_compared_with_its_namesake_is_named_apart() -> None:
    compared = compare_results(GOOD, "step-00030", BAD, "step-00010")
    same = compare_results(GOOD, "release", BAD, "release")
    assert compared.verdict.word == "better"
    assert same.verdict.word == "equal"
    assert "release (first) equals release (second)" in same.verdict.sentence
