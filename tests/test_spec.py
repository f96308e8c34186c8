"""drafter/spec.py: derived numbers, JSON, and values that no spec may hold."""

import json
from dataclasses import replace

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


def test_another_spec_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 2, expected 1"):
        DrafterSpec.from_json(SPEC.to_json() | {"spec_version": 2})


@pytest.mark.parametrize("wrong", [{"in_block": "full"}, {"window_origin": "slot"}, {"window": 0}])
def test_a_mask_policy_outside_its_docs_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong)))):
        MaskPolicy(**({"in_block": "causal"} | wrong))  # type: ignore[arg-type]
