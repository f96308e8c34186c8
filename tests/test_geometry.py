"""drafter/geometry.py: sizes from shapes, and tensors that do not fit."""

from dataclasses import replace

import pytest

from dflash_model.drafter.geometry import Shapes, read_geometry
from dflash_model.errors import CheckpointError
from tests.tiny_drafters import GEOMETRY, PAIR, shapes_in


def changed(**changes: tuple[int, ...] | None) -> dict[str, tuple[int, ...]]:
    """GEOMETRY's shapes with some set, or dropped (None)."""
    shapes: dict[str, tuple[int, ...] | None] = {**GEOMETRY.tensor_shapes(), **changes}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def test_every_size_is_read_from_the_shapes() -> None:
    assert read_geometry(GEOMETRY.tensor_shapes()) == GEOMETRY
    assert len(GEOMETRY.tensor_shapes()) == 3 + 11 * 2


def test_a_trained_checkpoint_by_hand() -> None:
    found = read_geometry(shapes_in(PAIR / "drafter" / "model.safetensors"))
    assert (found.hidden_size, found.intermediate_size, found.num_layers) == (96, 256, 2)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 32)
    assert (found.num_taps, found.attention_bias) == (3, False)


def test_bias_tensors_mean_attention_bias_and_must_be_complete() -> None:
    biased = replace(GEOMETRY, attention_bias=True)
    assert read_geometry(biased.tensor_shapes()) == biased
    assert len(biased.tensor_shapes()) == 3 + 15 * 2
    shapes = biased.tensor_shapes()
    del shapes["layers.1.self_attn.o_proj.bias"]
    with pytest.raises(CheckpointError, match=r"lacks 1 of the drafter's tensors: layers\.1\.self_attn\.o_proj\.bias"):
        read_geometry(shapes)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (changed(**{"hidden_norm.weight": None}), "lacks 1 of the drafter's tensors: hidden_norm.weight"),
        (changed(**{"norm.weight": None}), "has no tensor norm.weight"),
        (changed(**{"fc.weight": (24, 71)}), "71 is not a multiple of 24, the hidden size"),
        (changed(**{"layers.0.self_attn.q_proj.weight": (44, 24)}), "44 is not a multiple of 8, the head width"),
        (changed(**{"layers.1.mlp.down_proj.weight": (24, 39)}), r"down_proj.weight has shape \[24, 39\], expected \[24, 40\]"),
        (changed(**{"layers.1.self_attn.k_proj.weight": (24, 24)}), r"layers.1.self_attn.k_proj.weight has shape \[24, 24\]"),
        (changed(**{"layers.3.input_layernorm.weight": (24,)}), r"layers \[0, 1, 3\], with gaps"),
        (
            changed(**{"layers.2.input_layernorm.weight": (24,)}),
            "lacks 10 of the drafter's tensors: layers.2.mlp.down_proj.weight",
        ),
        (changed(**{"norm.weight": ()}), r"norm.weight has shape \[\]"),
        (changed(**{"layers.0.self_attn.q_proj.weight": (24, 24)}), "3 query heads cannot share 2"),
        (replace(GEOMETRY, head_dim=5).tensor_shapes(), "an even width"),
    ],
)
def test_tensors_that_do_not_fit_are_named(shapes: Shapes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_geometry(shapes)
