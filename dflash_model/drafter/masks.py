"""Masks: who sees whom, as one explicit boolean array per MaskPolicy. No attention backend's own flags are relied on.

Shapes: A anchors, S block rows, C context rows; queries and block keys in the order (anchor, slot).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_model.drafter.spec import MaskPolicy


def visible(policy: MaskPolicy, anchors: Tensor, *, block_size: int, context_length: int) -> Tensor:
    """[A * S, A * S + C] bool, True = the query sees the key.

    Keys are the blocks' own rows first, then the context positions 0..C-1. Blocks never see each other, and no query
    sees a context position at or past its anchor. `anchors`: [A] positions, int64.
    """
    count, keys = len(anchors), len(anchors) * block_size
    seen_ASK = torch.zeros(count, block_size, keys + context_length, dtype=torch.bool, device=anchors.device)  # noqa: N806
    own = _in_block(policy, torch.arange(block_size, device=anchors.device))
    for block in range(count):
        seen_ASK[block, :, block * block_size : (block + 1) * block_size] = own
    seen_ASK[:, :, keys:] = _in_context(policy, anchors, block_size, context_length)
    return seen_ASK.view(keys, -1)


def sees_everything(policy: MaskPolicy, anchor: int, *, block_size: int) -> bool:
    """Whether `visible` would be True everywhere for this anchor alone and the context below it."""
    if policy.in_block == "causal":
        return False
    if policy.window is None:
        return True
    last_key_distance = anchor if policy.window_origin == "anchor" else anchor + block_size
    return last_key_distance <= policy.window


def _in_block(policy: MaskPolicy, slots: Tensor) -> Tensor:
    """[S, S] for queries and keys of one block; the same for every anchor."""
    ahead = slots[None, :] - slots[:, None]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if policy.in_block == "causal":
        seen &= ahead <= 0
    if policy.window is not None and policy.window_origin == "query":
        seen &= ahead.abs() < policy.window
    return seen


def _in_context(policy: MaskPolicy, anchors: Tensor, block_size: int, context_length: int) -> Tensor:
    """[A, S or 1, C]: positions below the anchor and, with a window, not older than it allows."""
    context = torch.arange(context_length, device=anchors.device)
    seen = context < anchors[:, None, None]
    if policy.window is None:
        return seen
    if policy.window_origin == "anchor":
        return seen & (context >= anchors[:, None, None] - policy.window)
    queries = anchors[:, None, None] + torch.arange(block_size, device=anchors.device)[:, None]
    return seen & (context > queries - policy.window)
