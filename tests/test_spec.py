"""drafter/spec.py: derived numbers, JSON, and values that no spec may hold."""

import json
from dataclasses import replace
from typing import Any

import pytest

from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from tests.tiny_drafters import SPEC


def test_drafted_tokens_follow_the_slot_layout() -> None:
    assert SPEC.block_size == 5
    assert SPEC.drafted_tokens == 4
    assert replace(SPEC, shift=1).drafted_tokens == 5
    assert SPEC.num_taps == 3


def test_a_spec_survives_json_with_masks_rope_and_provenance() -> None:
    spec = replace(
        SPEC,
        layer_masks=(
            MaskPolicy(in_block="causal", window=7),
            MaskPolicy(in_block="bidirectional", window=9, window_origin="anchor"),
        ),
        rope=Rope(theta=1e7, dims=4),
        provenance={"block_size": "config.json block_size"},
    )
    assert DrafterSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_every_later_field_survives_json() -> None:
    scaling = (("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0), ("original_max_position_embeddings", 64.0))
    spec = replace(
        SPEC,
        family="dflash2",
        rope=Rope(theta=5.0, dims=8, type="llama3", scaling=scaling, sections=(2, 1, 1), interleaved=True),
        owns_embedding=True,
        owns_head=True,
        draft_vocab_size=20,
        mask_embedding=True,
        input_embedding_scale=2.0,
        output_multiplier=0.5,
        final_logit_softcapping=30.0,
        conv_kernel_size=2,
        conv_group_size=8,
        selector_rank=4,
        selector_top_k=3,
    )
    assert DrafterSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_spec_of_version_1_means_what_it_meant() -> None:
    masks = [{"in_block": "bidirectional", "window": None, "window_origin": "query"}] * 2
    old = {
        "spec_version": 1, "family": "dflash", "source_format": "zlab", "tap_indices": [2, 4, 5], "block_size": 5, "shift": 0,
        "mask_token_id": 3, "hidden_size": 24, "intermediate_size": 40, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2,
        "head_dim": 8, "rms_norm_eps": 1e-5, "attention_bias": False, "vocab_size": 50, "num_target_layers": 6,
        "rope": {"theta": 100.0, "dims": 8}, "layer_masks": masks, "provenance": {},
    }  # fmt: skip
    found = DrafterSpec.from_json(old)
    assert found == SPEC
    assert (found.rope.type, found.rope.scaling, found.rope.sections, found.rope.interleaved) == ("default", (), None, False)
    assert (found.owns_embedding, found.owns_head, found.draft_vocab_size, found.mask_embedding) == (False, False, None, False)
    assert (found.input_embedding_scale, found.output_multiplier, found.final_logit_softcapping) == (1.0, 1.0, None)
    assert (found.conv_kernel_size, found.conv_group_size, found.selector_rank, found.selector_top_k) == (None,) * 4
    assert found.to_json()["spec_version"] == 2


def test_another_spec_version_is_refused() -> None:
    for version in (0, 3, None):
        with pytest.raises(ValueError, match=rf"version {version}, expected one of \(1, 2\)"):
            DrafterSpec.from_json(SPEC.to_json() | {"spec_version": version})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"type": "dynamic"}, "rope type 'dynamic'"),
        ({"type": "linear"}, "rope scaling"),
        ({"scaling": (("factor", 2.0),)}, "rope scaling"),
        ({"type": "llama3", "scaling": (("factor", 2.0),)}, "rope scaling"),
        ({"dims": 7}, "rope dims 7"),
        ({"dims": 0}, "rope dims 0"),
        ({"sections": (2, 1)}, r"rope sections \(2, 1\) of 8 dims"),
        ({"sections": (4, 0)}, r"rope sections \(4, 0\)"),
    ],
)
def test_a_rotation_outside_its_docs_is_refused(wrong: dict[str, Any], message: str) -> None:
    Rope(theta=1.0, dims=8, sections=(3, 1))
    with pytest.raises(ValueError, match=message):
        Rope(**({"theta": 1.0, "dims": 8} | wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"family": "eagle"}, "family 'eagle'"),
        ({"family": "dflash2"}, "dflash2 without"),
        ({"selector_rank": 4}, "dflash with a convolution or a selector"),
        ({"draft_vocab_size": 20}, "draft_vocab_size without a head"),
        ({"rope": Rope(theta=1.0, dims=10)}, "rope dims 10 of heads 8 wide"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **wrong)


@pytest.mark.parametrize("wrong", [{"in_block": "full"}, {"window_origin": "slot"}, {"window": 0}])
def test_a_mask_policy_outside_its_docs_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong)))):
        MaskPolicy(**({"in_block": "causal"} | wrong))  # type: ignore[arg-type]
