"""Geometry: every size of a DFlash or DFlash2 drafter, read from its tensors' shapes alone.

Weights cannot lie about these sizes; configs can. So shapes decide, and a config that says otherwise is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_model.drafter.families import refuse_foreign_tensors
from dflash_model.drafter.parts import NO_PARTS, Parts, Shapes, read_parts
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import CheckpointError

_LAYER = re.compile(r"layers\.(\d+)\.")
_NOT_THIS = "Check that this is the file of a DFlash drafter, and that it is whole."


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Sizes of the backbone; the fields are named as in DrafterSpec."""

    hidden_size: int
    """From norm.weight."""

    intermediate_size: int
    """From layers.0.mlp.gate_proj.weight."""

    num_layers: int
    """From the layer numbers in the names."""

    num_heads: int
    """Rows of layers.0.self_attn.q_proj.weight over head_dim."""

    num_kv_heads: int
    """Rows of layers.0.self_attn.k_proj.weight over head_dim."""

    head_dim: int
    """From layers.0.self_attn.q_norm.weight."""

    num_taps: int
    """Columns of fc.weight over hidden_size."""

    attention_bias: bool
    """Whether layers.0.self_attn.q_proj.bias is there."""

    parts: Parts = NO_PARTS
    """What the file holds besides the backbone."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor that such a drafter has.

        3 + 11 a layer, 4 biases a layer with attention_bias, and those of its parts.
        """
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_heads * head, self.num_kv_heads * head
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, self.num_taps * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(self.num_layers):
            attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
            rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
            for name, size in rows.items():
                shapes[f"{attention}.{name}.weight"] = (size, queries if name == "o_proj" else hidden)
                if self.attention_bias:
                    shapes[f"{attention}.{name}.bias"] = (size,)
            shapes |= {f"{attention}.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
            shapes |= {f"{mlp}.{name}.weight": (inner, hidden) for name in ("gate_proj", "up_proj")}
            shapes[f"{mlp}.down_proj.weight"] = (hidden, inner)
            shapes |= {f"layers.{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        return shapes | self.parts.tensor_shapes(hidden_size=hidden, num_layers=self.num_layers)


SHAPE_OF = {
    "hidden_size": "norm.weight",
    "intermediate_size": "layers.0.mlp.gate_proj.weight",
    "num_layers": "layers.*",
    "num_heads": "layers.0.self_attn.q_proj.weight",
    "num_kv_heads": "layers.0.self_attn.k_proj.weight",
    "head_dim": "layers.0.self_attn.q_norm.weight",
    "num_taps": "fc.weight",
    "attention_bias": "layers.0.self_attn.q_proj.bias",
}
"""Geometry field -> the tensor that shows it."""


def read_geometry(shapes: Shapes) -> Geometry:
    """Sizes of the drafter whose tensors have these `shapes` (name -> shape).

    Raises CheckpointError naming the family where it is neither DFlash nor DFlash2, and the tensor that is missing, unknown or
    of a shape that does not fit the others.
    """
    refuse_foreign_tensors(shapes)
    hidden = _size(shapes, "norm.weight", axis=0)
    head_dim = _size(shapes, SHAPE_OF["head_dim"], axis=0)
    layers = {int(match[1]) for name in shapes if (match := _LAYER.match(name))}
    if max(layers) >= len(layers):
        raise CheckpointError(f"The file holds layers {sorted(layers)[:8]}, with gaps between them.", _NOT_THIS)
    geometry = Geometry(
        hidden_size=hidden,
        intermediate_size=_size(shapes, SHAPE_OF["intermediate_size"], axis=0),
        num_layers=len(layers),
        num_heads=_multiple(shapes, SHAPE_OF["num_heads"], axis=0, of=head_dim, named="the head width in q_norm"),
        num_kv_heads=_multiple(shapes, SHAPE_OF["num_kv_heads"], axis=0, of=head_dim, named="the head width in q_norm"),
        head_dim=head_dim,
        num_taps=_multiple(shapes, SHAPE_OF["num_taps"], axis=1, of=hidden, named="the hidden size in norm.weight"),
        attention_bias=SHAPE_OF["attention_bias"] in shapes,
        parts=read_parts(shapes, hidden_size=hidden),
    )
    if geometry.num_heads % geometry.num_kv_heads:
        raise CheckpointError(
            f"{geometry.num_heads} query heads cannot share {geometry.num_kv_heads} key/value heads.", _NOT_THIS
        )
    if head_dim % 2:
        raise CheckpointError(f"{SHAPE_OF['head_dim']} has {head_dim} entries; a rotated head has an even width.", _NOT_THIS)
    _compare(shapes, geometry.tensor_shapes())
    return geometry


def geometry_of(spec: DrafterSpec) -> Geometry:
    """The sizes of a drafter of this spec, parts included; an unknown vocabulary has no rows (ValueError where it needs some)."""
    rows = spec.draft_vocab_size or spec.vocab_size
    if rows is None and (spec.owns_embedding or spec.owns_head or spec.family == "dflash2"):
        raise ValueError("a drafter with tables of its own, but no vocab_size")
    parts = Parts(
        embedding_rows=spec.vocab_size if spec.owns_embedding else None,
        head_rows=rows if spec.owns_head else None,
        map_rows=spec.draft_vocab_size,
        mask_embedding=spec.mask_embedding,
        conv_kernel_size=spec.conv_kernel_size,
        conv_group_size=spec.conv_group_size,
        selector_rank=spec.selector_rank,
        selector_rows=spec.vocab_size if spec.family == "dflash2" else None,
    )
    return Geometry(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        num_taps=spec.num_taps,
        attention_bias=spec.attention_bias,
        parts=parts,
    )


def _size(shapes: Shapes, name: str, *, axis: int) -> int:
    shape = shapes.get(name)
    if shape is None:
        raise CheckpointError(f"The file has no tensor {name}, which every DFlash drafter has.", _NOT_THIS)
    if len(shape) <= axis or shape[axis] < 1:
        raise CheckpointError(f"{name} has shape {list(shape)}, which no DFlash drafter has.", _NOT_THIS)
    return shape[axis]


def _multiple(shapes: Shapes, name: str, *, axis: int, of: int, named: str) -> int:
    size = _size(shapes, name, axis=axis)
    if size % of:
        raise CheckpointError(f"{name} has shape {list(shapes[name])}: {size} is not a multiple of {of}, {named}.", _NOT_THIS)
    return size // of


def _compare(shapes: Shapes, expected: Shapes) -> None:
    missing = sorted(expected.keys() - shapes.keys())
    if missing:
        raise CheckpointError(f"The file lacks {len(missing)} of the drafter's tensors: {listed(missing)}.", _NOT_THIS)
    unknown = sorted(shapes.keys() - expected.keys())
    if unknown:
        raise CheckpointError(f"The file has tensors that belong to no layer of this drafter: {listed(unknown)}.", _NOT_THIS)
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise CheckpointError(f"{name} has shape {list(shapes[name])}, expected {list(shape)}.", _NOT_THIS)


def listed(names: list[str], *, most: int = 6) -> str:
    """The first `most` names, and how many more there are."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
