"""speculation_profile.json from a histogram worked out by hand."""

import copy
import json
from typing import Any

import pytest

from dflash_model.errors import InputError
from dflash_model.profile import speculation_profile
from tests.made_up_records import STORED

RESULT: dict[str, Any] = json.loads(STORED.read_text())


def result_with(histogram: dict[str, int], *, drafted: int = 3) -> dict[str, Any]:
    result = copy.deepcopy(RESULT)
    drafter = result["drafters"][0]
    drafter["histogram"] = histogram
    drafter["spec"] |= {"block_size": drafted + 1, "drafted_tokens": drafted}
    return result


def test_rates_count_lengths_from_two() -> None:
    """10 steps: 4 of length 1, 3 of 2, 2 of 3, 1 of 4. P(>= 2) = 0.6, P(>= 3) = 0.3, P(>= 4) = 0.1; mean 20 / 10."""
    profile = speculation_profile(result_with({"1": 4, "2": 3, "3": 2, "4": 1}), "step-000220")
    assert profile["marginal_accept_rates"] == [0.6, 0.3, 0.1]
    assert profile["conditional_accept_rates"] == [0.6, 0.5, 0.333333]
    assert profile["mean_accept_length"] == 2.0
    assert profile["accept_length_by_k"] == {"3": 2.0}
    assert profile["num_speculative_tokens"] == profile["max_supported_k"] == 3
    assert profile["block_size"] == 4
    assert profile["validation"]["mean_consistency"]["passed"]
    assert profile["validation"]["marginal_monotonicity"] == {"passed": True, "violations": []}


def test_a_gap_in_the_histogram_still_counts_the_longer_steps() -> None:
    """No step of length 2: P(>= 2) is P(>= 3), not 0."""
    profile = speculation_profile(result_with({"1": 5, "3": 5}), "step-000220")
    assert profile["marginal_accept_rates"] == [0.5, 0.5, 0.0]
    assert profile["conditional_accept_rates"] == [0.5, 1.0, 0.0]
    assert profile["mean_accept_length"] == 2.0


def test_a_k_below_what_was_drafted_fails_the_profiles_own_check() -> None:
    profile = speculation_profile(result_with({"1": 1, "4": 9}, drafted=1), "step-000220")
    check = profile["validation"]["mean_consistency"]
    assert not check["passed"]
    assert (check["implied_mean_accept_length"], check["reported_mean_accept_length"]) == (1.9, 3.7)


def test_the_profile_says_how_it_was_measured() -> None:
    profile = speculation_profile(RESULT, "step-000165", conditions={"dataset": "held-out", "osl": 180})
    drafter = RESULT["drafters"][1]
    assert profile["schema_version"] == "1.0"
    assert (profile["method"], profile["accept_length_model"]) == ("dflash", "measured_per_k")
    assert profile["mean_accept_length"] == drafter["tau"]["pooled"]
    assert profile["mean_accept_length_per_request"] == drafter["tau"]["per_request"]
    assert profile["acceptance_length_histogram"] == drafter["histogram"]
    assert profile["per_category"]["count"] == {"mean_accept_length": drafter["categories"]["count"]["tau"]}
    assert profile["measurement_conditions"] == {
        "num_samples": 60,
        "bonus_token": "counted",
        "tail": "truncated",
        "validation": "replay over the target's own greedy tokens",
        "dataset": "held-out",
        "osl": 180,
    }
    json.dumps(profile, allow_nan=False)


def test_what_cannot_be_profiled_is_refused() -> None:
    with pytest.raises(InputError, match="no drafter nightly"):
        speculation_profile(RESULT, "nightly")
    with pytest.raises(InputError, match="no verify step"):
        speculation_profile(result_with({}), "step-000220")
