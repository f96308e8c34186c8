"""drafter/rotation.py: the base of the rotation, from every place where it may stand."""

from typing import Any

import pytest

from dflash_model.drafter.claims import Source
from dflash_model.drafter.rotation import read_thetas
from dflash_model.errors import ConfigError


def thetas(**values: Any) -> list[tuple[float, str]]:
    return [(claim.value, claim.place) for claim in read_thetas(Source(label="c", values=values))]


def test_every_place_is_read_and_none_is_a_default() -> None:
    assert thetas(rope_theta=10000) == [(10000.0, "c rope_theta")]
    assert thetas(rope_scaling={"rope_theta": 5.0, "type": "default"}) == [(5.0, "c rope_scaling.rope_theta")]
    both = thetas(rope_parameters={"rope_theta": 7.0, "rope_type": "default"}, rope_theta=8.0, rope_scaling=None)
    assert both == [(7.0, "c rope_parameters.rope_theta"), (8.0, "c rope_theta")]
    assert thetas() == []
    assert thetas(rope_parameters={"rope_type": "default"}) == []


def test_per_layer_type_only_the_types_in_use_count() -> None:
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert thetas(rope_parameters=nested) == [(1e6, "c rope_parameters.full_attention.rope_theta")]
    slides = thetas(rope_parameters=nested, layer_types=["sliding_attention"])
    assert slides == [(1e4, "c rope_parameters.sliding_attention.rope_theta")]
    assert len(thetas(rope_parameters=nested, layer_types=["sliding_attention", "full_attention"])) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 64.0}, "rope_theta": 1e7}, "rope_scaling.rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_parameters.rope_type is 'llama3'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters.full_attention.rope_type is 'yarn'"),
        ({"partial_rotary_factor": 0.25}, "c partial_rotary_factor is 0.25, but z-lab's drafters rotate the whole head"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "rope_parameters.partial_rotary_factor is 0.25"),
        ({"rope_parameters": 10000.0}, "rope_parameters is 10000.0, expected an object"),
        ({"rope_theta": "10000"}, "rope_theta is '10000', expected a number above 0"),
        ({"rope_theta": True}, "rope_theta is True, expected a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, expected a number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 0"),
    ],
)
def test_another_rotation_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thetas(**values)


def test_a_partial_factor_of_one_is_whole_head_rotation() -> None:
    assert thetas(partial_rotary_factor=1, rope_parameters={"partial_rotary_factor": 1.0, "rope_theta": 2.0})[0][0] == 2.0
