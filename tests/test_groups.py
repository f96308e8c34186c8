"""Differences within groups: numbers worked out by hand, and what makes a group."""

import pytest

from dflash_model.comparison import Rules
from dflash_model.groups import group_differences, length_bucket
from dflash_model.totals import RequestTotals

RULES = Rules(min_prompts=3, resamples=99)


def rows(*steps_and_tokens: tuple[int, int]) -> list[RequestTotals]:
    return [
        RequestTotals(sample_id=f"p{number}", category=None, steps=steps, tokens=tokens)
        for number, (steps, tokens) in enumerate(steps_and_tokens)
    ]


CANDIDATE = rows((10, 20), (10, 30), (10, 40), (10, 50))
REFERENCE = rows((10, 30), (20, 60), (5, 20), (10, 20))


def test_each_group_has_its_own_pooled_difference() -> None:
    labels = {"category": {"p0": "code", "p1": "code", "p2": "math", "p3": "math"}}
    code, math = group_differences(CANDIDATE, REFERENCE, labels, rules=RULES)
    # code: 50/20 - 90/30; math: 90/20 - 40/15
    assert (code.axis, code.group, code.prompts) == ("category", "code", 2)
    assert code.difference == pytest.approx(2.5 - 3.0)
    assert math.difference == pytest.approx(4.5 - 40 / 15)
    assert code.interval is None


def test_a_group_with_enough_prompts_has_an_interval_of_its_own() -> None:
    labels = {"mode": {"p0": "thinking", "p1": "thinking", "p2": "thinking", "p3": "plain"}}
    plain, thinking = group_differences(CANDIDATE, REFERENCE, labels, rules=RULES)
    assert plain.interval is None
    assert thinking.interval is not None
    assert thinking.interval[0] < thinking.difference < thinking.interval[1]


def test_an_axis_with_one_group_says_nothing_and_unlabelled_prompts_are_in_none() -> None:
    labels = {"category": dict.fromkeys(("p0", "p1", "p2", "p3"), "all"), "language": {"p0": "en", "p3": "zh"}}
    found = group_differences(CANDIDATE, REFERENCE, labels, rules=RULES)
    assert [(one.axis, one.group, one.prompts) for one in found] == [("language", "en", 1), ("language", "zh", 1)]


def test_a_group_without_a_common_step_is_left_out() -> None:
    candidate = rows((0, 0), (10, 30))
    labels = {"category": {"p0": "empty", "p1": "full"}}
    assert [one.group for one in group_differences(candidate, rows((1, 1), (10, 20)), labels, rules=RULES)] == ["full"]


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [
        (1, "up to 64 tokens"),
        (64, "up to 64 tokens"),
        (65, "65 to 256 tokens"),
        (256, "65 to 256 tokens"),
        (1024, "257 to 1024 tokens"),
        (1025, "over 1024 tokens"),
    ],
)
def test_length_buckets_meet_without_gap(tokens: int, bucket: str) -> None:
    assert length_bucket(tokens) == bucket


def test_length_buckets_stand_from_short_to_long() -> None:
    labels = {"length": {"p0": "over 1024 tokens", "p1": "65 to 256 tokens", "p2": "up to 64 tokens", "p3": "257 to 1024 tokens"}}
    found = group_differences(CANDIDATE, REFERENCE, labels, rules=RULES)
    assert [one.group for one in found] == ["up to 64 tokens", "65 to 256 tokens", "257 to 1024 tokens", "over 1024 tokens"]
