"""drafter/bare.py: a state dict without a config, and who may speak for it."""

from dataclasses import fields, replace
from typing import Any

import pytest

from dflash_model.drafter.bare import read_bare
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.errors import CheckpointError, ConfigError
from tests.tiny_drafters import FULL, GEOMETRY, SPEC, zlab_config

SHAPES = GEOMETRY.tensor_shapes()
OPTIONS: dict[str, Any] = {
    "mask_token_id": 3, "target_layer_ids": [1, 3, 4], "block_size": 5, "rope_theta": 100.0, "rms_norm_eps": 1e-5
}  # fmt: skip


def spec(saved_args: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **rest: Any) -> DrafterSpec:
    return read_bare(SHAPES, saved_args=saved_args, config=config, **rest).spec


def without_origin(found: DrafterSpec) -> DrafterSpec:
    return replace(found, provenance={}, source_format="zlab", vocab_size=50, num_target_layers=6)


def test_options_alone_and_shapes_make_a_whole_spec() -> None:
    found = spec(**OPTIONS)
    assert without_origin(found) == SPEC
    assert found.source_format == "bare"
    assert (found.vocab_size, found.num_target_layers) == (None, None)
    assert set(found.provenance) == {f.name for f in fields(DrafterSpec)} - {"provenance"}
    assert found.provenance["tap_indices"] == "--target-layer-ids"
    assert found.provenance["hidden_size"] == "shape of norm.weight"
    assert found.provenance["layer_masks"].startswith("not stated: full attention")


def test_biases_are_seen_in_the_shapes() -> None:
    biased = replace(GEOMETRY, attention_bias=True)
    assert read_bare(biased.tensor_shapes(), saved_args=None, config=None, **OPTIONS).spec.attention_bias


@pytest.mark.parametrize("given", [0, 1, 2, 5])
def test_everything_that_is_missing_is_asked_for_at_once(given: int) -> None:
    names = {
        "mask_token_id": "--mask-token-id", "target_layer_ids": "--target-layer-ids", "block_size": "--block-size",
        "rope_theta": "--rope-theta", "rms_norm_eps": "--rms-norm-eps",
    }  # fmt: skip
    options = dict(list(OPTIONS.items())[:given])
    missing = [name for key, name in names.items() if key not in options]
    if not missing:
        assert spec(**options).block_size == 5
        return
    with pytest.raises(ConfigError, match=f"nothing states {len(missing)} of the settings") as caught:
        spec(**options)
    assert caught.value.fix.startswith(f"Give {', '.join(missing)}; or --config ")
    assert "--config-from" in caught.value.fix


def test_an_epsilon_is_never_assumed() -> None:
    with pytest.raises(ConfigError) as caught:
        spec(**{**OPTIONS, "rms_norm_eps": None})
    assert caught.value.fix.startswith("Give --rms-norm-eps;")


def test_a_config_in_z_lab_form_is_enough() -> None:
    found = spec(config=zlab_config(layer_types=["full_attention", "full_attention"]))
    assert without_origin(found) == SPEC
    assert found.provenance["block_size"] == "config.json block_size"
    assert found.provenance["layer_masks"] == "config.json layer_types"


def test_saved_args_fill_what_options_and_config_leave_open_and_say_so() -> None:
    saved = {
        "block_size": 5,
        "mask_token_id": 3,
        "target_layer_ids": "1,3,4",
        "rope_theta": 100.0,
        "lr": 6e-4,
        "hidden_size": 999,
    }
    found = spec(saved, rms_norm_eps=1e-5)
    assert without_origin(found) == SPEC
    assert found.provenance["mask_token_id"] == "the trainer's saved args mask_token_id"
    assert found.provenance["rms_norm_eps"] == "--rms-norm-eps"
    nested = spec(
        {"dflash_config": {"block_size": 5, "mask_token_id": 3, "target_layer_ids": (1, 3, 4)}}, rope_theta=100, rms_norm_eps=1e-5
    )
    assert nested.provenance["block_size"] == "the trainer's saved args dflash_config.block_size"


def test_an_option_wins_the_provenance_when_all_agree() -> None:
    found = spec({"block_size": 5}, zlab_config(), block_size=5)
    assert found.provenance["block_size"] == "--block-size"


@pytest.mark.parametrize(
    ("saved", "config", "options", "message"),
    [
        ({"block_size": 8}, None, OPTIONS, "--block-size is 5, but the trainer's saved args block_size is 8"),
        ({"rope_theta": 1e6}, None, OPTIONS, "--rope-theta is 100.0, but the trainer's saved args rope_theta is 1000000.0"),
        ({"mask_token_id": 4}, None, OPTIONS, "--mask-token-id is 3, but the trainer's saved args mask_token_id is 4"),
        ({"target_layer_ids": [1, 3, 5]}, None, OPTIONS, r"--target-layer-ids is \(1, 3, 4\), but .*\(1, 3, 5\)"),
        ({"rms_norm_eps": 1e-6}, None, OPTIONS, "--rms-norm-eps is 1e-05, but the trainer's saved args rms_norm_eps is 1e-06"),
        (None, zlab_config(), {"block_size": 4}, "--block-size is 4, but config.json block_size is 5"),
        ({"block_size": 8}, zlab_config(), {}, "config.json block_size is 5, but the trainer's saved args block_size is 8"),
        (None, zlab_config(hidden_size=32), {}, "hidden_size is 32, but norm.weight in the weights shows 24"),
        (None, None, {**OPTIONS, "target_layer_ids": [1, 3]}, r"--target-layer-ids is \[1, 3\], 2 layers, but fc.weight reads 3"),
        (None, None, {**OPTIONS, "block_size": 1}, "--block-size is 1, expected a whole number of at least 2"),
        (None, zlab_config(architectures=["DFlash2DraftModel"]), {}, "DFlash2"),
        ({"markov_rank": 64}, None, OPTIONS, "saved args markov_rank is 64: this is a DSpark drafter"),
        ({"rope_scaling": {"rope_type": "yarn"}}, None, OPTIONS, "saved args rope_scaling.rope_type is 'yarn'"),
        (
            {"is_causal": True}, zlab_config(is_causal=False), {}, "but the trainer's saved args .* is_causal is .*causal",
        ),
    ],
)  # fmt: skip
def test_two_statements_that_differ_are_both_quoted(
    saved: dict[str, Any] | None, config: dict[str, Any] | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(saved, config, **options)


def test_a_reference_drafter_fills_the_rest_and_says_so() -> None:
    reference = replace(SPEC, layer_masks=(MaskPolicy(in_block="causal", window=9), FULL), shift=1, rope=Rope(theta=7.0, dims=8))
    found = spec(config_from=reference, block_size=4)
    assert (found.block_size, found.mask_token_id, found.tap_indices, found.rope.theta) == (4, 3, (2, 4, 5), 7.0)
    assert (found.layer_masks, found.shift) == (reference.layer_masks, 1)
    assert (found.vocab_size, found.num_target_layers, found.rms_norm_eps) == (50, 6, 1e-5)
    assert found.provenance["block_size"] == "--block-size"
    assert found.provenance["mask_token_id"] == "the reference drafter's spec"
    assert found.provenance["rope"].startswith("the reference drafter's spec")


def test_a_given_config_that_is_silent_about_masks_means_plain_dflash_not_the_reference() -> None:
    reference = replace(SPEC, layer_masks=(MaskPolicy(in_block="causal"),) * 2, shift=1)
    found = spec(config=zlab_config(), config_from=reference)
    assert (found.layer_masks, found.shift) == ((FULL, FULL), 0)


def test_every_size_that_differs_from_the_reference_is_listed() -> None:
    other = replace(
        SPEC, hidden_size=25, intermediate_size=41, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=16, tap_indices=(2, 4), attention_bias=True
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        spec(config_from=other, **OPTIONS)
    listed = caught.value.problem
    for expected in (
        "hidden_size 24 here, 25 there", "intermediate_size 40 here, 41 there", "num_layers 2 here, 3 there", "num_heads 6 here, 8 there",
        "num_kv_heads 2 here, 4 there", "head_dim 8 here, 16 there", "num_taps 3 here, 2 there", "attention_bias False here, True there",
    ):  # fmt: skip
        assert expected in listed
    assert listed.count(";") == 7


def test_foreign_tensors_are_refused() -> None:
    with pytest.raises(CheckpointError, match="DSpark"):
        read_bare(SHAPES | {"markov_head.markov_w1.weight": (50, 4)}, saved_args=None, config=None, **OPTIONS)
