"""Looping and served requests: tau without loops, the engine's counters against the replay, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dflash_model.loops import RULE
from dflash_model.reference_checks import reference_section
from dflash_model.report import render_report
from dflash_model.result import result_schema
from dflash_model.served import Served, served_from, tokens_per_step
from dflash_model.target.references import Reference
from tests.made_up_records import made_up_result

jsonschema = pytest.importorskip("jsonschema")

FACTS = {"from": "sglang", "token_source": "ids", "refused": {}}


def reference(sample_id: str, completion: list[int], served: Served | None = None) -> Reference:
    return Reference(
        sample_id=sample_id,
        prompt_ids=(1,),
        completion_ids=tuple(completion),
        overshoot_ids=(),
        finish="length",
        logprobs=None,
        engine="sglang",
        served=served,
    )


def served(tokens: int, steps: int) -> Served:
    found = served_from({"spec_verify_ct": steps}, tokens=tokens)
    assert found is not None
    return found


def drafter(name: str, **requests: tuple[int, int]) -> dict[str, Any]:
    rows = [{"sample_id": sample, "steps": steps, "tokens": tokens} for sample, (steps, tokens) in requests.items()]
    return {"name": name, "requests": rows}


STRAIGHT, LOOP = list(range(60)), [7, 8] * 30
DRAFTERS = [drafter("new", a=(10, 30), b=(5, 40), c=(8, 20)), drafter("old", a=(20, 40), b=(4, 40), c=(8, 16))]


def test_tau_is_given_without_the_looping_completions() -> None:
    section = reference_section([reference("a", STRAIGHT), reference("b", LOOP), reference("c", STRAIGHT)], FACTS, DRAFTERS)
    assert section["looping"] == {
        "rule": RULE,
        "requests": {"b": 60},
        # (30 + 20) / (10 + 8) and (40 + 16) / (20 + 8); with the loop it would be 90 / 23 and 96 / 32.
        "tau_without": {"new": round(50 / 18, 6), "old": 2.0},
    }
    assert section["served"] is None
    assert section["notes"] == ["1 of 3 completions run in circles, which flatters tau; without them: new 2.78, old 2.00."]


def test_where_everything_loops_there_is_no_tau_without() -> None:
    section = reference_section([reference("b", LOOP)], FACTS, DRAFTERS)
    assert section["looping"]["tau_without"] == {"new": None, "old": None}
    assert "new has no step" in section["notes"][0]


def test_the_engines_counters_stand_beside_the_replay_of_the_same_requests() -> None:
    made = [reference("a", STRAIGHT, served(31, 12)), reference("b", STRAIGHT, served(41, 8)), reference("c", STRAIGHT)]
    section = reference_section(made, FACTS, DRAFTERS)
    # 30 + 40 tokens after the first in 12 + 8 steps; replays of a and b alone: 70 / 15 and 80 / 24.
    assert section["served"]["tokens_per_step"] == 3.5
    assert (section["served"]["requests"], section["served"]["verify_steps"]) == (2, 20)
    assert section["served"]["replayed"] == {"new": round(70 / 15, 6), "old": round(80 / 24, 6)}
    assert section["notes"] == [
        "The engine's own drafter earned 3.50 tokens a step on 2 requests; replayed on the same: new 4.67, old 3.33."
    ]


def test_left_out_prompts_and_text_are_said() -> None:
    facts = FACTS | {"token_source": "text", "refused": {"z": "its text is another one"}}
    notes = reference_section([reference("a", STRAIGHT)], facts, DRAFTERS)["notes"]
    assert notes == [
        "1 of 2 prompts are left out: the engine's answers cannot be told exactly.",
        "The engine told text only: tokens are that text's own tokenisation.",
    ]


def test_the_token_from_prefill_is_no_verify_steps() -> None:
    assert tokens_per_step([served(9, 2), served(5, 4)]) == 2.0
    assert tokens_per_step([]) is None
    assert served_from({"spec_verify_ct": 0}, tokens=5) is None
    assert served_from({"spec_accept_length": 3.0}, tokens=5) is None


@pytest.mark.parametrize("with_counters", [False, True])
def test_a_result_with_the_section_fits_the_schema_and_the_report_shows_it(with_counters: bool) -> None:
    result = made_up_result()
    samples = [request["sample_id"] for request in result["drafters"][0]["requests"]]
    made = [
        reference(sample, LOOP if n == 0 else STRAIGHT, served(60, 20) if with_counters else None)
        for n, sample in enumerate(samples)
    ]
    result["references"] = reference_section(made, FACTS | {"refused": {"gone": "no <ids>"}}, result["drafters"])
    jsonschema.Draft202012Validator(result_schema()).validate(json.loads(json.dumps(result)))
    page = render_report(result)
    assert "Looping here: " + samples[0] in page
    assert "Left out: gone: no &lt;ids&gt;" in page
    assert ("the engine's own drafter" in page) is with_counters
    before = dict(result)
    del before["references"]
    jsonschema.Draft202012Validator(result_schema()).validate(json.loads(json.dumps(before)))
    assert "Looping here" not in render_report(before)
