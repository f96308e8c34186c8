"""drafter/rotation.py: base, type and extent of the rotation, from every place where they may stand."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_model.drafter.claims import Claim, Source
from dflash_model.drafter.rotation import Rotation, read_rotation, read_thetas
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


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip


def rotation(**values: Any) -> Claim[Rotation] | None:
    return read_rotation(Source(label="c", values=values), head_dim=32)


def turned(**values: Any) -> Rotation:
    claim = rotation(**values)
    assert claim is not None
    assert claim.warning is None
    return claim.value


def test_nothing_said_is_nothing_read() -> None:
    assert rotation(rope_theta=1e4) is None
    assert rotation(rope_parameters={"rope_theta": 1e4}, rope_scaling=None) is None


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_the_type_has_two_spellings(key: str) -> None:
    assert turned(rope_scaling={key: "linear", "factor": 4}) == Rotation(dims=32, type="linear", scaling=(("factor", 4.0),))


def test_llama3_takes_its_four_numbers() -> None:
    assert dict(turned(rope_parameters=LLAMA3).scaling) == {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64.0
    }  # fmt: skip


def test_yarn_fills_what_transformers_fills() -> None:
    plain = dict(turned(rope_scaling=YARN).scaling)
    assert plain == {
        "factor": 4.0, "original_max_position_embeddings": 64.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": 1.0,
        "attention_factor": pytest.approx(0.1 * 1.3862943611198906 + 1),
    }  # fmt: skip
    given = dict(turned(rope_scaling=YARN | {"attention_factor": 1.5, "beta_fast": 8, "truncate": False}).scaling)
    assert (given["attention_factor"], given["beta_fast"], given["truncate"]) == (1.5, 8.0, 0.0)
    scaled = dict(turned(rope_scaling=YARN | {"mscale": 2.0, "mscale_all_dim": 1.0}).scaling)
    assert scaled["attention_factor"] == pytest.approx((0.2 * 1.3862943611198906 + 1) / (0.1 * 1.3862943611198906 + 1))


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, {"rope_type": "linear", "factor": 4.0}])
@pytest.mark.parametrize("more", [{}, {"mscale": 2.0, "mscale_all_dim": 0.5}, {"beta_fast": 8.0, "beta_slow": 2.0}])
def test_the_numbers_are_those_that_transformers_computes_with(scaling: dict[str, Any], more: dict[str, Any]) -> None:
    """With every number explicit, transformers computes the frequencies that it computes from the config as written."""
    if more and scaling is not YARN:
        return
    written = scaling | more
    read_back = turned(rope_parameters=written)
    explicit = {name: bool(value) if name == "truncate" else value for name, value in read_back.scaling}
    expected, actual = frequencies(written), frequencies(explicit | {"rope_type": read_back.type})
    assert torch.equal(expected[0], actual[0])
    assert expected[1] == pytest.approx(actual[1], rel=1e-12)


def frequencies(group: dict[str, Any]) -> tuple[torch.Tensor, float]:
    config = Qwen3Config(head_dim=32, rope_parameters={"rope_theta": 1e4} | group, max_position_embeddings=256)
    inverse, factor = ROPE_INIT_FUNCTIONS[group["rope_type"]](config)
    return inverse, factor


def test_a_partial_factor_is_passed_over_as_trainers_do_and_said() -> None:
    for values in ({"partial_rotary_factor": 0.25}, {"rope_parameters": {"partial_rotary_factor": 0.25}}):
        claim = rotation(**values)
        assert claim is not None
        assert claim.value == Rotation(dims=32)
        assert claim.warning is not None
        assert "partial_rotary_factor is 0.25, but all 32 dimensions" in claim.warning
        assert "honours it rotates 8" in claim.warning
    assert turned(partial_rotary_factor=1.0) == Rotation(dims=32)


def test_stated_dimensions_end_all_doubt() -> None:
    assert turned(rotary_dim=8, partial_rotary_factor=0.25) == Rotation(dims=8)
    assert turned(rotary_dim=32, partial_rotary_factor=0.25) == Rotation(dims=32)
    assert turned(dflash_config={"rotary_dim": 8}, rope_scaling={"type": "linear", "factor": 2.0}).dims == 8


def test_sections_divide_the_rotated_dimensions() -> None:
    assert turned(rope_scaling={"mrope_section": [8, 4, 4], "type": "mrope"}) == Rotation(dims=32, sections=(8, 4, 4))
    leaked = rotation(rope_parameters={"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25, "rope_type": "default"})
    assert leaked is not None
    assert leaked.value == Rotation(dims=32)
    assert leaked.warning is not None
    assert "[2, 1, 1] is passed over" in leaked.warning
    assert turned(rotary_dim=8, rope_parameters={"mrope_section": [2, 1, 1]}).sections == (2, 1, 1)


def test_pairs_are_interleaved_where_a_key_says_so() -> None:
    assert turned(is_neox_style=False).interleaved
    assert not turned(is_neox_style=True).interleaved
    assert turned(rope_interleave=True).interleaved


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is 'dynamic'; only default, linear"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling.type is 'mrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type is 'linear', but c rope_scaling gives no factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "gives no original_max_position_embeddings"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, "gives no factor"),
        ({"rope_parameters": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "gives no low_freq_factor"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor is 4.0, but high_freq_factor is 4.0"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling holds factor but no rope_type"),
        ({"rope_scaling": {"rope_type": "default", "alpha": 2.0}}, "rope_scaling holds alpha, which no known rotation has"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn"}}, "rope_type is 'linear', but c rope_scaling.type is 'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, r"rope_type is \('default', \(\)\), but"),
        ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "rope_parameters.full_attention.rope_type is 'dynamic'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected a share of at most 1"),
        ({"partial_rotary_factor": 0.5, "rope_scaling": YARN}, "partial_rotary_factor is 0.5 with RoPE of type 'yarn'"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}}, "is 0.25, but c partial_rotary_factor is 0.5"),
        ({"rotary_dim": 34}, "rotary_dim is 34, expected an even number of at most 32"),
        ({"rotary_dim": 7}, "rotary_dim is 7, expected an even number"),
        ({"rope_scaling": {"mrope_section": [8, 4]}}, r"mrope_section is \[8, 4\], which makes 24 dimensions, but 32 are rotated"),
        ({"rope_scaling": {"mrope_section": 16}}, "mrope_section is 16, expected a list"),
        ({"is_neox_style": 0}, "is_neox_style is 0, expected true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_applied_exactly_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rotation(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_parameters": 10000.0}, "rope_parameters is 10000.0, expected an object"),
        ({"rope_theta": "10000"}, "rope_theta is '10000', expected a number above 0"),
        ({"rope_theta": True}, "rope_theta is True, expected a number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, expected a number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number above 0"),
    ],
)
def test_a_base_that_is_no_positive_number_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        thetas(**values)
