"""Block masks of a training step: one rule of who sees whom, as a flex_attention block mask and as its dense SDPA twin.

Queries are block rows in the order (anchor, slot); keys are the row's N context positions first, then the block rows.
Context means strictly before the anchor: the target has not run on the anchor's token when its block is drafted.

Shapes: B rows, N context positions, A anchors a row, S block rows, Q = A * S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from dflash_model.drafter.spec import MaskPolicy

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, query, key) index tensors that broadcast -> bool; flex_attention's mask_mod."""

SDPA, FLEX = "sdpa", "flex"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """Where the blocks of one step lie."""

    anchors: Tensor
    """[B, A] int64 positions."""

    documents: Tensor
    """[B, N] document of each context position, -1 for padding; a block sees its anchor's document only."""

    block_size: int
    """S."""

    context_past_anchor: int = 0
    """Context positions seen from the anchor on. 0 is right; 1 lets the anchor's own state in, a known training bug."""

    @property
    def context_length(self) -> int:
        """N."""
        return self.documents.shape[1]

    @property
    def num_queries(self) -> int:
        """Q."""
        return self.anchors.shape[1] * self.block_size


def visibility_rule(policy: MaskPolicy, layout: Layout) -> Rule:
    """The rule of one draft layer. It closes over the layout's tensors and reads no value of theirs."""
    anchors, documents, size, length = layout.anchors, layout.documents, layout.block_size, layout.context_length
    limit = layout.context_past_anchor

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // size, query % size
        anchor = anchors[row, block]
        position = key.clamp(max=length - 1)
        in_context = (key < length) & (position < anchor + limit) & (documents[row, position] == documents[row, anchor])
        key_slot = (key - length) % size
        in_block = (key >= length) & ((key - length) // size == block)
        if policy.in_block == "causal":
            in_block = in_block & (key_slot <= slot)
        if policy.window is not None and policy.window_origin == "anchor":
            in_context = in_context & (position >= anchor - policy.window)
        elif policy.window is not None:
            in_context = in_context & (anchor + slot - position < policy.window)
            in_block = in_block & ((key_slot - slot).abs() < policy.window)
        return in_context | in_block

    return sees


def dense_mask(policy: MaskPolicy, layout: Layout) -> Tensor:
    """[B, 1, Q, N + Q] bool, True = visible: the twin for scaled_dot_product_attention."""
    device = layout.anchors.device
    row = torch.arange(len(layout.anchors), device=device)[:, None, None]
    query = torch.arange(layout.num_queries, device=device)[None, :, None]
    key = torch.arange(layout.context_length + layout.num_queries, device=device)[None, None, :]
    return visibility_rule(policy, layout)(row, row, query, key)[:, None]


def flex_mask(policy: MaskPolicy, layout: Layout) -> Any:
    """The same visibility as a flex_attention BlockMask (torch gives it no public type)."""
    return create_block_mask(
        visibility_rule(policy, layout),
        B=len(layout.anchors),
        H=None,
        Q_LEN=layout.num_queries,
        KV_LEN=layout.context_length + layout.num_queries,
        device=str(layout.anchors.device),
    )


def masks_of_step(policies: Iterable[MaskPolicy], layout: Layout, *, backend: str) -> dict[MaskPolicy, Any]:
    """One mask per distinct policy: layers of one kind share it. Raises ValueError for an unknown backend."""
    if backend not in (SDPA, FLEX):
        raise ValueError(f"attention backend {backend!r}, expected {SDPA!r} or {FLEX!r}")
    make = dense_mask if backend == SDPA else flex_mask
    return {policy: make(policy, layout) for policy in dict.fromkeys(policies)}
