"""drafter/deepspec.py: DeepSpec's own DFlash, shifted and with its own embedding and head."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_model.drafter.building import Reading
from dflash_model.drafter.deepspec import read_deepspec
from dflash_model.drafter.geometry import Geometry
from dflash_model.errors import CheckpointError, ConfigError
from tests.drafter_forms import OWN_TABLES, deepspec_config, geometry_with
from tests.tiny_drafters import GEOMETRY, SPEC


def read(geometry: Geometry = OWN_TABLES, **changes: Any) -> Reading:
    return read_deepspec(deepspec_config(**changes), geometry.tensor_shapes())


def test_a_saved_config_is_plain_dflash_shifted_by_one() -> None:
    reading = read()
    expected = replace(SPEC, source_format="deepspec", shift=1, owns_embedding=True, owns_head=True)
    assert replace(reading.spec, provenance={}) == expected
    assert reading.spec.drafted_tokens == 5
    assert reading.warnings == ()


def test_layer_minus_one_is_the_embeddings_output() -> None:
    assert read(target_layer_ids=[-1, 3, 4]).spec.tap_indices == (0, 4, 5)
    assert read(target_layer_ids=[0, 3, 4]).spec.tap_indices == (1, 4, 5)


def test_a_partial_factor_copied_from_the_target_rotates_the_whole_head_with_a_warning() -> None:
    reading = read(rope_parameters={"partial_rotary_factor": 0.25})
    assert reading.spec.rope.dims == 8
    (warning,) = reading.warnings
    assert "partial_rotary_factor is 0.25, but all 8 dimensions of a head are rotated" in warning


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": 256}, "markov_rank is 256: this is a DSpark drafter"),
        ({"markov_rank": ...}, "gives no markov_rank"),
        ({"enable_confidence_head": True}, "enable_confidence_head is True: this is a DSpark drafter"),
        ({"architectures": ["Gemma4DSparkModel", "Qwen3DSparkModel"]}, "Gemma4DSparkModel"),
        ({"target_layer_ids": [-2, 3, 4]}, r"target_layer_ids\[0\] is -2, expected a whole number of at least -1"),
        ({"target_layer_ids": [3, -1, 4]}, "unique layer numbers in increasing order"),
        ({"target_layer_ids": ...}, "gives no target_layer_ids"),
        ({"sample_from_anchor": False}, "sample_from_anchor says that slot 0 is dropped"),
    ],
)
def test_what_is_not_that_drafter_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**changes)


@pytest.mark.parametrize(("geometry", "lacking"), [(GEOMETRY, "embed_tokens"), (geometry_with(embedding_rows=50), "lm_head")])
def test_its_tables_must_be_there(geometry: Geometry, lacking: str) -> None:
    with pytest.raises(CheckpointError, match=f"no tensor {lacking}.weight"):
        read(geometry)
