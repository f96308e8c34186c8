"""drafter/zlab.py: a config.json and its weights' shapes into the neutral spec, or one sentence about what is wrong."""

import json
from dataclasses import fields
from typing import Any

import pytest

from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.drafter.zlab import read_zlab
from dflash_model.errors import CheckpointError, ConfigError
from tests.tiny_drafters import GEOMETRY, PAIR, shapes_in, zlab_config

SHAPES = GEOMETRY.tensor_shapes()


def spec(**changes: Any) -> DrafterSpec:
    return read_zlab(zlab_config(**changes), SHAPES).spec


def test_the_trained_pairs_config_by_hand() -> None:
    directory = PAIR / "drafter"
    found = read_zlab(json.loads((directory / "config.json").read_text()), shapes_in(directory / "model.safetensors")).spec
    assert (found.family, found.source_format, found.shift) == ("dflash", "zlab", 0)
    assert found.tap_indices == (2, 4, 5)  # ids 1, 3, 4
    assert (found.block_size, found.mask_token_id, found.drafted_tokens) == (8, 3, 7)
    assert (found.hidden_size, found.intermediate_size, found.num_layers) == (96, 256, 2)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 32)
    assert (found.rms_norm_eps, found.attention_bias) == (1e-6, False)
    assert (found.vocab_size, found.num_target_layers) == (512, 6)
    assert found.rope == Rope(theta=10000.0, dims=32)
    assert found.layer_masks == (MaskPolicy(in_block="bidirectional"),) * 2


def test_every_field_has_a_provenance() -> None:
    found = spec()
    assert set(found.provenance) == {f.name for f in fields(DrafterSpec)} - {"provenance"}
    assert found.provenance["block_size"] == "config.json block_size"
    assert found.provenance["tap_indices"] == "config.json dflash_config.target_layer_ids"
    assert found.provenance["rope"] == "config.json rope_theta; whole-head rotation"
    assert found.provenance["layer_masks"].startswith("not stated: full attention")
    assert spec(head_dim=...).provenance["head_dim"] == "shape of layers.0.self_attn.q_norm.weight"


def test_old_and_new_places_give_the_same_spec() -> None:
    new = spec(
        block_size=..., rope_theta=..., dflash_config={"block_size": 5}, rope_parameters={"rope_theta": 100.0, "rope_type": "default"}
    )  # fmt: skip
    old = spec()
    assert (new.block_size, new.rope) == (old.block_size, old.rope)
    assert new.provenance["block_size"] == "config.json dflash_config.block_size"
    assert spec(dflash_config={"block_size": 5}).block_size == 5


def test_sizes_that_the_config_omits_come_from_the_weights() -> None:
    bare = spec(
        hidden_size=..., num_key_value_heads=None, head_dim=..., attention_bias=..., num_target_layers=..., vocab_size=...
    )
    assert (bare.hidden_size, bare.num_kv_heads, bare.head_dim, bare.attention_bias) == (24, 2, 8, False)
    assert (bare.num_target_layers, bare.vocab_size) == (None, None)


def test_the_last_target_layer_is_an_allowed_tap() -> None:
    assert spec(dflash_config={"target_layer_ids": [1, 3, 5]}).tap_indices == (2, 4, 6)


def test_a_declared_anchor_first_layout_is_shift_one() -> None:
    found = spec(dflash_config={"sample_from_anchor": True})
    assert (found.shift, found.drafted_tokens) == (1, 5)
    assert spec(sample_from_anchor=False).shift == 0


def test_keys_that_nothing_reads_are_listed() -> None:
    assert (
        spec(dflash_config={"num_anchors": 512, "gamma": 4}).provenance["unread"]
        == "dflash_config.gamma, dflash_config.num_anchors"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 6, "dflash_config": {"block_size": 5}}, "dflash_config.block_size is 5, but config.json block_size is 6"),
        ({"block_size": ...}, "gives no block_size"),
        ({"block_size": 1}, "block_size is 1, expected a whole number of at least 2"),
        ({"block_size": 5.0}, "block_size is 5.0, expected a whole number"),
        ({"dflash_config": {"mask_token_id": None}}, "gives no mask_token_id"),
        ({"dflash_config": {"mask_token_id": True}}, "mask_token_id is True, expected a whole number"),
        ({"dflash_config": {"mask_token_id": 50}}, "mask_token_id is 50, but config.json vocab_size is 50"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id is -1"),
        ({"dflash_config": {"target_layer_ids": ...}}, "gives no target_layer_ids"),
        ({"dflash_config": ...}, "gives no mask_token_id"),
        ({"dflash_config": [1]}, r"dflash_config is \[1\], expected a mapping"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 3]}}, "unique layer numbers in increasing order"),
        ({"dflash_config": {"target_layer_ids": [4, 3, 1]}}, "unique layer numbers in increasing order"),
        ({"dflash_config": {"target_layer_ids": [1, 3, 6]}}, r"\[1, 3, 6\], but config.json num_target_layers is 6"),
        ({"dflash_config": {"target_layer_ids": [-1, 3, 4]}}, r"target_layer_ids\[0\] is -1"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, r"\[1, 3\], 2 layers, but fc.weight reads 3"),
        ({"dflash_config": {"target_layer_ids": []}}, r"is \[\], expected a list"),
        ({"target_layer_ids": [1, 2, 4]}, r"\(1, 3, 4\), but config.json target_layer_ids is \(1, 2, 4\)"),
        ({"rope_theta": ...}, "gives no rope_theta .*rope_parameters.rope_theta"),
        (
            {"rope_parameters": {"rope_theta": 1e7}},
            "rope_parameters.rope_theta is 10000000.0, but config.json rope_theta is 100.0",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
        ({"dflash_config": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5"),
        ({"rms_norm_eps": ...}, "gives no rms_norm_eps"),
        ({"hidden_size": 32}, "hidden_size is 32, but norm.weight in the weights shows 24"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers is 3, but layers\.\* in the weights shows 2"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3"),
        ({"attention_bias": True}, "attention_bias is True, but layers.0.self_attn.q_proj.bias in the weights shows False"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"sample_from_anchor": True, "dflash_config": {"query_zero_predicts_next": False}}, "sample_from_anchor is True, but"),
    ],
)
def test_a_bad_config_is_one_sentence_with_key_and_value_and_a_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        spec(**changes)
    assert caught.value.problem.endswith(".")
    assert "\n" not in caught.value.problem
    assert caught.value.fix.endswith(".")


def test_foreign_tensors_are_refused_even_with_a_plain_config() -> None:
    with pytest.raises(CheckpointError, match="DFlash2"):
        read_zlab(zlab_config(), SHAPES | {"layers.0.mlp_conv.base_kernel": (2, 2, 24)})
