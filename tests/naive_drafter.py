"""An independent reference for tests: one anchor at a time, one head at a time, everything recomputed, no shared code.

It reads weights by name and DrafterSpec's plain fields, and decides who sees whom in a Python loop.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from dflash_model.drafter.spec import DrafterSpec, MaskPolicy

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def turn(vector: Tensor, position: int, theta: float, dims: int) -> Tensor:
    """Rotate pairs (i, i + dims / 2) of one head vector by position * theta^(-2 i / dims)."""
    out = vector.clone()
    half = dims // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / dims)
        a, b = vector[i], vector[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def turn_rows(rows: Tensor, positions: list[int], theta: float, dims: int) -> Tensor:
    """`turn` for each row, by complex multiplication; test_backbone checks it against `turn`."""
    half = dims // 2
    rates = torch.tensor([theta ** (-2 * i / dims) for i in range(half)])
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * rates
    pairs = torch.complex(rows[:, :half].contiguous(), rows[:, half:dims].contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat([pairs.real, pairs.imag, rows[:, dims:]], dim=1)


def may_see(policy: MaskPolicy, anchor: int, slot: int, key: int) -> bool:
    """Whether the query at anchor + slot sees the key at position `key` (context below the anchor, else its own block)."""
    query = anchor + slot
    if key >= anchor and policy.in_block == "causal" and key > query:
        return False
    if policy.window is None:
        return True
    if policy.window_origin == "anchor":
        return key >= anchor or key >= anchor - policy.window
    return abs(query - key) < policy.window


@functools.cache
def seen_keys(policy: MaskPolicy, anchor: int, block_size: int) -> Tensor:
    """[S, anchor + S] bool."""
    keys = range(anchor + block_size)
    return torch.tensor([[may_see(policy, anchor, slot, key) for key in keys] for slot in range(block_size)])


def draft(
    weights: Weights,
    spec: DrafterSpec,
    states: Tensor,
    block: Tensor,
    anchor: int,
    *,
    context_change: int = 0,
    position_change: int = 0,
) -> Tensor:
    """Hidden states [S, H] of one embedded block [S, H] at `anchor`, from target states [> anchor, T * H].

    Two mistakes can be made on purpose (with full attention only): `context_change` shows that many context rows more
    than there are below the anchor, `position_change` counts the block's positions from that much past the anchor.
    """
    eps = spec.rms_norm_eps
    context = norm(states[: anchor + context_change] @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    first = anchor + position_change
    positions = [*range(len(context)), *range(first, first + len(block))]
    x = block
    for layer in range(spec.num_layers):
        part = {name.removeprefix(f"layers.{layer}."): w for name, w in weights.items() if name.startswith(f"layers.{layer}.")}
        seen = torch.ones(len(block), len(positions), dtype=torch.bool)
        if not context_change:
            seen = seen_keys(spec.layer_masks[layer], anchor, len(block))
        h = norm(x, part["input_layernorm.weight"], eps)
        x = x + attend(part, spec, seen, context, h, positions)
        h = norm(x, part["post_attention_layernorm.weight"], eps)
        gate = h @ part["mlp.gate_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"], eps)


def attend(part: Weights, spec: DrafterSpec, seen: Tensor, context: Tensor, h: Tensor, positions: list[int]) -> Tensor:
    rows = torch.cat([context, h])
    outs = []
    for head in range(spec.num_heads):
        kv = head // (spec.num_heads // spec.num_kv_heads)
        q = norm(project(part, "q_proj", h, head, spec.head_dim), part["self_attn.q_norm.weight"], spec.rms_norm_eps)
        k = norm(project(part, "k_proj", rows, kv, spec.head_dim), part["self_attn.k_norm.weight"], spec.rms_norm_eps)
        v = project(part, "v_proj", rows, kv, spec.head_dim)
        q = turn_rows(q, positions[len(context) :], spec.rope.theta, spec.rope.dims)
        k = turn_rows(k, positions, spec.rope.theta, spec.rope.dims)
        scores = (q @ k.T / math.sqrt(spec.head_dim)).masked_fill(~seen, -math.inf)
        outs.append(torch.softmax(scores, dim=-1) @ v)
    out = torch.cat(outs, dim=1) @ part["self_attn.o_proj.weight"].T
    return out + part["self_attn.o_proj.bias"] if spec.attention_bias else out


def project(part: Weights, name: str, rows: Tensor, head: int, width: int) -> Tensor:
    heads = slice(head * width, (head + 1) * width)
    out = rows @ part[f"self_attn.{name}.weight"][heads].T
    return out + part[f"self_attn.{name}.bias"][heads] if f"self_attn.{name}.bias" in part else out
