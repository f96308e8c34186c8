"""The training forward: a drafter's own weights over many anchors of many rows at once, differentiable.

The evaluation backbone computes the same function without gradients, one context at a time; a test compares them. The
context is projected once a step, and each mask kind is made once a step, whatever the number of layers.

Shapes: B rows, N context positions, T taps, H hidden, A anchors, S block rows, D drafted tokens, R rows of any kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from dflash_model.drafter.backbone import Attention, Drafter, Layer
from dflash_model.drafter.rotary import Rotation, rotate, rotation_table
from dflash_model.drafter.tables import DraftTables
from dflash_model.training.block_masks import FLEX, SDPA, Layout, masks_of_step

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def hidden_states(
    drafter: Drafter, states: Tensor, token_ids: Tensor, layout: Layout, *, tables: DraftTables, backend: str = SDPA
) -> Tensor:
    """[B, A, D, H] ready for the head, of blocks at `layout`'s anchors.

    `states` [B, N, T * H]: target states, taps in spec order. `token_ids` [B, N]: only the anchors' are used. Output d
    speaks of the token at anchor + d + 1, for either shift.
    """
    spec = drafter.spec
    rows, length = token_ids.shape
    ctx = drafter.hidden_norm(drafter.fc(states.to(drafter.dtype))).flatten(0, 1)
    x = tables.blocks(token_ids.gather(1, layout.anchors).flatten()).flatten(0, 1)
    positions = torch.arange(length, device=token_ids.device).repeat(rows)
    slots = torch.arange(spec.block_size, device=token_ids.device)
    block_positions = (layout.anchors[:, :, None] + slots).flatten()
    rotations = tuple(rotation_table(spec.rope, each, dtype=drafter.dtype) for each in (positions, block_positions))
    masks = masks_of_step(spec.layer_masks, layout, backend=backend)
    attend = _flex if backend == FLEX else _sdpa
    for layer in drafter.layers:
        assert isinstance(layer, Layer)
        x = layer.mix(x, _attention_of(layer.self_attn, ctx, rotations, masks[layer.self_attn.policy], rows, attend))
    out: Tensor = drafter.norm(x).view(*layout.anchors.shape, spec.block_size, spec.hidden_size)
    return out[:, :, 1 - spec.shift :]


def _attention_of(
    attention: Attention, ctx: Tensor, rotations: tuple[Rotation, ...], mask: Any, rows: int, attend: Attend
) -> Callable[[Tensor], Tensor]:
    """What `Layer.mix` calls: block rows [R, H] over [their row's context | their row's blocks]."""
    return lambda x: _attention(attention, x, ctx, rotations, mask, rows, attend)


def _attention(
    attention: Attention, x: Tensor, ctx: Tensor, rotations: tuple[Rotation, ...], mask: Any, rows: int, attend: Attend
) -> Tensor:
    """Block rows [R, H] over [their row's context | their row's blocks]; the mask says what of it they see."""
    head = attention.head_dim
    context_rotation, block_rotation = rotations
    q = rotate(attention.q_norm(attention.q_proj(x).view(len(x), -1, head)), *block_rotation)
    context = attention.keys_values(ctx, context_rotation)
    block = attention.keys_values(x, block_rotation)
    k, v = (
        torch.cat([c.view(rows, -1, *c.shape[1:]), b.view(rows, -1, *b.shape[1:])], dim=1).transpose(1, 2)
        for c, b in zip(context, block, strict=True)
    )
    out = attend(q.view(rows, -1, *q.shape[1:]).transpose(1, 2), k, v, mask)
    projected: Tensor = attention.o_proj(out.transpose(1, 2).reshape(len(x), -1))
    return projected


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    attend: Any = _compiled_flex() if q.is_cuda else flex_attention
    out: Tensor = attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    """flex_attention is a kernel only when compiled; uncompiled it is a reference that holds every score."""
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    return compiled
