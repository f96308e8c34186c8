"""Parts: what a drafter's file may hold besides the plain backbone, and the sizes that its shapes show.

Own embedding, own head, vocabulary map, mask embedding, and DFlash2's convolutions and candidate selector. Which of them
is used is decided by the tensors that are there, never by what a config hopes for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_model.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
VOCABULARY_MAP = "d2t"
MASK_EMBEDDING = "mask_embedding"
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
SELECTOR_PROJECTION = "candidate_selector.hidden_projection.weight"
CONVOLUTIONS = ("attention_conv", "mlp_conv")
_DFLASH2 = re.compile(r"(layers\.\d+\.(attention_conv|mlp_conv)|candidate_selector)\.")
_FIRST_KERNEL = "layers.0.attention_conv.base_kernel"
_FIRST_PROJECTION = "layers.0.attention_conv.kernel_projection.weight"
_WHOLE = "Check that the file is whole and that this is the checkpoint that was meant."


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Sizes of what is there; None or False where it is not. The names follow DrafterSpec's."""

    embedding_rows: int | None = None
    """Rows of embed_tokens.weight."""

    head_rows: int | None = None
    """Rows of lm_head.weight."""

    map_rows: int | None = None
    """Entries of d2t."""

    mask_embedding: bool = False
    """Whether mask_embedding is there."""

    conv_kernel_size: int | None = None
    """Taps of DFlash2's convolutions, from base_kernel."""

    conv_group_size: int | None = None
    """Channels that share a dynamic kernel, from kernel_projection."""

    selector_rank: int | None = None
    """Columns of the candidate selector's codebooks."""

    selector_rows: int | None = None
    """Rows of the codebooks: the vocabulary."""

    @property
    def is_dflash2(self) -> bool:
        """Whether the tensors are DFlash2's."""
        return self.selector_rank is not None

    def tensor_shapes(self, *, hidden_size: int, num_layers: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of these parts."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.embedding_rows is not None:
            shapes[EMBEDDING] = (self.embedding_rows, hidden_size)
        if self.head_rows is not None:
            shapes[HEAD] = (self.head_rows, hidden_size)
        if self.map_rows is not None:
            shapes[VOCABULARY_MAP] = (self.map_rows,)
        if self.mask_embedding:
            shapes[MASK_EMBEDDING] = (hidden_size,)
        if self.conv_kernel_size is None or self.conv_group_size is None or self.selector_rank is None:
            return shapes
        assert self.selector_rows is not None
        shapes |= dict.fromkeys(CODEBOOKS, (self.selector_rows, self.selector_rank))
        shapes[SELECTOR_PROJECTION] = (self.selector_rank, hidden_size)
        groups = hidden_size // self.conv_group_size
        for layer in range(num_layers):
            for conv in CONVOLUTIONS:
                shapes[f"layers.{layer}.{conv}.base_kernel"] = (2, self.conv_kernel_size, hidden_size)
                shapes[f"layers.{layer}.{conv}.kernel_projection.weight"] = (2 * self.conv_kernel_size * groups, hidden_size)
        return shapes


NO_PARTS = Parts()
"""A plain drafter."""


def read_parts(shapes: Shapes, *, hidden_size: int) -> Parts:
    """The parts among tensors of these `shapes` (name -> shape). Raises CheckpointError for one that cannot be."""
    rows = {name: _axis(shapes, name, axis=0, axes=2 if name != VOCABULARY_MAP else 1) for name in _TABLES if name in shapes}
    if VOCABULARY_MAP in rows and HEAD not in rows:
        raise CheckpointError(
            f"The file holds {VOCABULARY_MAP} but no {HEAD}: a reduced vocabulary needs a head of its own.", _WHOLE
        )
    if VOCABULARY_MAP in rows and rows[VOCABULARY_MAP] != rows[HEAD]:
        raise CheckpointError(
            f"{VOCABULARY_MAP} has {rows[VOCABULARY_MAP]} entries, but {HEAD} has {rows[HEAD]} rows.",
            "Take both from the same checkpoint: entry i of the map speaks of row i of the head.",
        )
    found = Parts(
        embedding_rows=rows.get(EMBEDDING),
        head_rows=rows.get(HEAD),
        map_rows=rows.get(VOCABULARY_MAP),
        mask_embedding=MASK_EMBEDDING in shapes,
    )
    return _with_dflash2(found, shapes, hidden_size) if any(_DFLASH2.match(name) for name in shapes) else found


_TABLES = (EMBEDDING, HEAD, VOCABULARY_MAP)


def _with_dflash2(found: Parts, shapes: Shapes, hidden_size: int) -> Parts:
    for name in (_FIRST_KERNEL, _FIRST_PROJECTION, *CODEBOOKS, SELECTOR_PROJECTION):
        if name not in shapes:
            raise CheckpointError(f"This is a DFlash2 drafter, but the file has no tensor {name}.", _WHOLE)
    taps = _axis(shapes, _FIRST_KERNEL, axis=1, axes=3)
    kernels = _axis(shapes, _FIRST_PROJECTION, axis=0, axes=2)
    groups, rest = divmod(kernels, 2 * taps)
    if rest or not groups or hidden_size % groups:
        raise CheckpointError(
            f"{_FIRST_PROJECTION} has {kernels} rows, which no group size of {hidden_size} channels and {taps} taps gives.",
            _WHOLE,
        )
    return Parts(
        embedding_rows=found.embedding_rows,
        head_rows=found.head_rows,
        map_rows=found.map_rows,
        mask_embedding=found.mask_embedding,
        conv_kernel_size=taps,
        conv_group_size=hidden_size // groups,
        selector_rank=_axis(shapes, CODEBOOKS[0], axis=1, axes=2),
        selector_rows=_axis(shapes, CODEBOOKS[0], axis=0, axes=2),
    )


def _axis(shapes: Shapes, name: str, *, axis: int, axes: int) -> int:
    shape = shapes[name]
    if len(shape) != axes or shape[axis] < 1:
        raise CheckpointError(f"{name} has shape {list(shape)}, which no DFlash drafter has.", _WHOLE)
    return shape[axis]
