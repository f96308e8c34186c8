"""result.json: its form, its determinism, and that nothing unmeasured becomes a number."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from dflash_model.comparison import Rules
from dflash_model.digests import canonical_json
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.errors import InputError, NotEvaluable
from dflash_model.metrics import request_rows, tau_pooled
from dflash_model.replay.records import SampleRecords
from dflash_model.result import CANDIDATE, REFERENCE, DrafterRecords, build_result, result_schema
from tests.made_up_records import STORED, hand_records, made_up_records, made_up_result, made_up_spec

jsonschema = pytest.importorskip("jsonschema")

GOOD = made_up_records(1, sharpness=3.6, late=0.2, prompts=12)
PLAIN = made_up_records(2, sharpness=3.2, late=0.3, prompts=12)


def drafter(name: str, role: str, records: list[SampleRecords]) -> DrafterRecords:
    return DrafterRecords(name=name, role=role, step=1, digest="0" * 64, spec=made_up_spec(), records=records)


def result_of(*drafters: DrafterRecords, **changes: Any) -> dict[str, Any]:
    facts = {"count": 12, "digest": "1" * 64, "categories": {"all": 12}}
    arguments: dict[str, Any] = {
        "drafters": drafters,
        "categories": {},
        "prompts_facts": facts,
        "target_facts": {"name": "t"},
        "fidelity": None,
        "rules": Rules(resamples=199),
    }
    return build_result(**(arguments | changes))


def validated(result: dict[str, Any]) -> dict[str, Any]:
    """The result as a reader of its JSON gets it, after the schema was checked."""
    read: dict[str, Any] = json.loads(canonical_json(result))
    jsonschema.Draft202012Validator(result_schema()).validate(read)
    return read


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(result_schema())


def test_the_stored_result_is_what_the_records_give_today() -> None:
    stored = json.loads(STORED.read_text())
    assert validated(made_up_result()) == stored
    assert stored["headline"] == "2 candidates against release: step-000220 better (+0.36), step-000165 worse (-0.25)."


def test_a_result_is_json_as_it_is_built() -> None:
    result = result_of(drafter("new", CANDIDATE, GOOD), drafter("old", REFERENCE, PLAIN))
    assert validated(result) == result


def test_the_schema_notices_a_changed_form() -> None:
    validator = jsonschema.Draft202012Validator(result_schema())
    whole = json.loads(STORED.read_text())
    assert validator.is_valid(whole)
    for change in (
        {"schema_version": 2},
        {"started_at": "today"},
        {"tail": "other"},
        {"fidelity": {"verdict": "FAIL"}},
        {"drafters": []},
        {"drafters": [whole["drafters"][0] | {"tau": 4.2}]},
        {"drafters": [{key: value for key, value in whole["drafters"][0].items() if key != "slots"}]},
    ):
        assert not validator.is_valid(whole | change), change


def test_equal_evaluations_give_equal_bytes_in_any_order_of_the_records() -> None:
    shuffled = list(GOOD)
    random.Random(1).shuffle(shuffled)
    assert shuffled != GOOD
    first, second = (
        canonical_json(result_of(drafter("new", CANDIDATE, records), drafter("old", REFERENCE, PLAIN)))
        for records in (GOOD, shuffled)
    )
    assert first == second


def test_numbers_are_those_of_the_metrics_rounded_to_six_places() -> None:
    new = validated(result_of(drafter("new", CANDIDATE, GOOD), drafter("old", REFERENCE, PLAIN)))["drafters"][0]
    value = tau_pooled(request_rows(GOOD)).value
    assert value is not None
    assert new["tau"]["pooled"] == round(value, 6) != value
    assert new["tau"]["steps"] == sum(row["steps"] for row in new["requests"]) == sum(new["histogram"].values())
    assert new["slots"][0]["survival"] >= new["slots"][-1]["survival"]
    versus = new["vs_reference"]
    assert versus["reference"] == "old"
    assert versus["verdict"] == "better"
    effects = versus["slot_effects"]
    assert effects[versus["parts_at_slot"] - 1] == max(effects)


def test_a_worse_drafter_parts_where_it_loses_most() -> None:
    versus = result_of(drafter("new", CANDIDATE, PLAIN), drafter("old", REFERENCE, GOOD))["drafters"][0]["vs_reference"]
    assert versus["verdict"] == "worse"
    assert versus["slot_effects"][versus["parts_at_slot"] - 1] == min(versus["slot_effects"])


def test_the_slot_where_they_part_lies_on_the_side_of_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A better drafter may lose a lot at one slot; what made it better is elsewhere."""
    monkeypatch.setattr("dflash_model.result.slot_effects", lambda _candidate, _reference: [-0.5, 0.2, 0.3, None])
    drafters = drafter("new", CANDIDATE, GOOD), drafter("old", REFERENCE, PLAIN)
    assert result_of(*drafters)["drafters"][0]["vs_reference"]["parts_at_slot"] == 3
    drafters = drafter("new", CANDIDATE, PLAIN), drafter("old", REFERENCE, GOOD)
    assert result_of(*drafters)["drafters"][0]["vs_reference"]["parts_at_slot"] == 1


def test_without_a_reference_there_is_no_comparison() -> None:
    result = validated(result_of(drafter("alone", CANDIDATE, GOOD)))
    assert result["drafters"][0]["vs_reference"] is None
    assert result["headline"].endswith("there is no reference to compare with.")


def test_the_headline_of_one_candidate_is_its_sentence() -> None:
    result = result_of(drafter("new", CANDIDATE, GOOD), drafter("old", REFERENCE, PLAIN))
    assert result["headline"] == result["drafters"][0]["vs_reference"]["sentence"]


def test_what_was_not_measured_is_null() -> None:
    """Two prompts without a step, records of four candidates: no tau, no tree, no verdict, and no zero for them."""
    nothing = [hand_records("a", [], completion=0), hand_records("b", [[9, 9, 9]], completion=1)]
    result = validated(
        result_of(drafter("new", CANDIDATE, nothing), drafter("old", REFERENCE, nothing), categories={"a": "code"})
    )
    for one in result["drafters"]:
        assert (one["tau"]["pooled"], one["tau"]["interval"], one["tau"]["per_request"]) == (None, None, None)
        assert (one["tau"]["requests"], one["tau"]["requests_without_steps"]) == (2, 2)
        assert one["streak"] == {"4": None, "8": None}
        assert one["ddtree"] == {"16": None, "64": None}
        assert one["slots"] == []
        assert one["categories"]["code"] == {"tau": None, "interval": None, "prompts": 0, "steps": 0}
    versus = result["drafters"][0]["vs_reference"]
    assert versus["verdict"] == "no verdict"
    assert {versus[key] for key in ("difference", "interval", "p_value", "equal_within", "parts_at_slot")} == {None}


def test_a_tree_wider_than_the_records_is_null_and_the_narrow_one_is_not() -> None:
    narrow = [replace(one, top_logprobs=one.top_logprobs[:, :, :16], top_ids=one.top_ids[:, :, :16]) for one in GOOD]
    trees = result_of(drafter("new", CANDIDATE, narrow))["drafters"][0]["ddtree"]
    assert trees["16"] is not None
    assert trees["64"] is None


def test_near_ties_are_counted_in_the_records_unless_given() -> None:
    tied = [replace(one, top_logprobs=one.top_logprobs.copy()) for one in GOOD]
    tied[0].top_logprobs[3, 2, 1] = tied[0].top_logprobs[3, 2, 0]
    assert result_of(drafter("new", CANDIDATE, tied))["drafters"][0]["near_ties"] == 1
    assert result_of(replace(drafter("new", CANDIDATE, tied), near_ties=7))["drafters"][0]["near_ties"] == 7


def test_the_spec_of_a_real_drafter_is_summarised() -> None:
    spec = DrafterSpec(
        family="dflash",
        source_format="zlab",
        tap_indices=(2, 5),
        block_size=8,
        shift=1,
        mask_token_id=3,
        hidden_size=96,
        intermediate_size=192,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        attention_bias=False,
        vocab_size=None,
        num_target_layers=8,
        rope=Rope(theta=1e4, dims=32),
        layer_masks=(MaskPolicy(in_block="causal", window=64),),
    )
    result = validated(result_of(replace(drafter("new", CANDIDATE, GOOD), spec=spec.to_json())))
    summary = result["drafters"][0]["spec"]
    assert (summary["block_size"], summary["drafted_tokens"], summary["tap_indices"]) == (8, 8, [2, 5])
    assert summary["layer_masks"] == [{"in_block": "causal", "window": 64, "window_origin": "query"}]


def test_a_failed_fidelity_gate_gives_no_result() -> None:
    with pytest.raises(NotEvaluable, match="fidelity gate"):
        result_of(drafter("new", CANDIDATE, GOOD), fidelity={"verdict": "FAIL"})


def test_names_and_roles_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no name twice"):
        result_of(drafter("new", CANDIDATE, GOOD), drafter("new", REFERENCE, PLAIN))
    with pytest.raises(ValueError, match="at most one reference"):
        result_of(drafter("a", REFERENCE, GOOD), drafter("b", REFERENCE, PLAIN))
    with pytest.raises(ValueError, match="at most one reference"):
        result_of(drafter("a", "judge", GOOD))
    with pytest.raises(ValueError, match="at least one"):
        result_of()
    with pytest.raises(ValueError, match="several records of one prompt"):
        result_of(drafter("a", CANDIDATE, [GOOD[0], GOOD[0]]))


def test_drafters_scored_on_different_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="not scored on the same prompts"):
        result_of(drafter("new", CANDIDATE, GOOD[:-1]), drafter("old", REFERENCE, PLAIN))
