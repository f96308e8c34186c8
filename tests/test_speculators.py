"""drafter/speculators.py: speculators' config.json and tensors into the neutral spec."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_model.drafter.building import Reading
from dflash_model.drafter.geometry import Geometry
from dflash_model.drafter.spec import MaskPolicy
from dflash_model.drafter.speculators import read_speculators
from dflash_model.errors import ConfigError
from tests.drafter_forms import DFLASH2, DFLASH2_KEYS, DRAFT_VOCABULARY, OWN_TABLES, REDUCED, sliding, speculators_config
from tests.tiny_drafters import FULL, GEOMETRY, SPEC

EXPECTED = replace(SPEC, source_format="speculators", num_target_layers=None)


def read(geometry: Geometry = GEOMETRY, **changes: Any) -> Reading:
    return read_speculators(speculators_config(**changes), geometry.tensor_shapes())


def test_a_saved_config_is_read_and_its_layer_ids_are_tuple_indices_already() -> None:
    reading = read()
    assert replace(reading.spec, provenance={}) == EXPECTED
    assert reading.spec.tap_indices == (2, 4, 5)
    assert reading.warnings == ()
    assert reading.spec.provenance["rms_norm_eps"] == "config.json transformer_layer_config.rms_norm_eps"
    assert "unread" not in reading.spec.provenance


def test_a_window_is_measured_from_the_anchor_and_causal_unless_the_config_says_otherwise() -> None:
    assert read(transformer_layer_config=sliding()).spec.layer_masks == (
        MaskPolicy(in_block="causal", window=7, window_origin="anchor"),
        FULL,
    )
    free = read(transformer_layer_config=sliding(), sliding_window_non_causal=True).spec.layer_masks
    assert free[0] == MaskPolicy(in_block="bidirectional", window=7, window_origin="anchor")
    assert read(transformer_layer_config=sliding(), sliding_window_non_causal=...).spec.layer_masks[0].in_block == "causal"


def test_a_sliding_layer_without_a_window_is_full_as_speculators_trains_it_and_says_so() -> None:
    reading = read(transformer_layer_config=sliding() | {"sliding_window": None, "use_sliding_window": False})
    assert reading.spec.layer_masks == (FULL, FULL)
    (warning,) = reading.warnings
    assert "without a sliding_window" in warning


def test_sampling_from_the_anchor_is_shift_one() -> None:
    shifted = read(sample_from_anchor=True).spec
    assert (shifted.shift, shifted.drafted_tokens) == (1, 5)
    older = read(sample_from_anchor=...).spec
    assert older.shift == 0
    assert older.provenance["shift"].startswith("not stated")


def test_copies_of_embedding_and_head_belong_to_the_drafter() -> None:
    spec = read(OWN_TABLES).spec
    assert (spec.owns_embedding, spec.owns_head, spec.draft_vocab_size) == (True, True, None)


def test_a_reduced_vocabulary_is_the_heads_rows() -> None:
    spec = read(REDUCED, draft_vocab_size=DRAFT_VOCABULARY).spec
    assert (spec.owns_embedding, spec.owns_head, spec.draft_vocab_size, spec.vocab_size) == (False, True, 20, 50)


def test_dflash2_sees_the_whole_block_where_the_config_does_not_say() -> None:
    changes: dict[str, Any] = DFLASH2_KEYS | {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}
    spec = read(DFLASH2, **changes, transformer_layer_config=sliding(), sliding_window_non_causal=...).spec
    assert (spec.family, spec.conv_kernel_size, spec.conv_group_size, spec.selector_rank, spec.selector_top_k) == (
        "dflash2", 2, 8, 4, 3,
    )  # fmt: skip
    assert spec.layer_masks[0].in_block == "bidirectional"


def test_a_rotation_per_layer_type_is_the_sliding_ones_as_speculators_applies_it() -> None:
    rope = {
        "rope_theta": ..., "rope_type": ...,
        "full_attention": {"rope_theta": 7.0, "rope_type": "default"}, "sliding_attention": {"rope_theta": 9.0, "rope_type": "default"},
    }  # fmt: skip
    assert read(transformer_layer_config={"rope_parameters": rope}).spec.rope.theta == 9.0


def test_a_config_that_asks_for_more_tokens_than_a_block_drafts_is_a_warning() -> None:
    (warning,) = read(speculators_config={"proposal_methods": [{"speculative_tokens": 5}]}).warnings
    assert "asks for 5 speculative tokens, but a block drafts 4" in warning


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("dspark", "DSpark"), ("xpress", "XPress"), ("eagle3", "EAGLE-3"), ("peagle", "P-EAGLE"), ("mtp", "MTP"), ("new", "unknown family"),
        (7, "is 7, which is no text"),
    ],
)  # fmt: skip
def test_another_family_is_named(model_type: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(speculators_model_type=model_type)
