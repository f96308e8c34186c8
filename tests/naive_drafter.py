"""An independent reference for tests: one anchor at a time, one head at a time, everything recomputed, no shared code.

It reads weights by name and DrafterSpec's plain fields, and decides who sees whom in a Python loop.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope

Weights = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def rates(rope: Rope) -> list[float]:
    """Radians per position of each pair, in double precision."""
    found = [rope.theta ** (-2 * i / rope.dims) for i in range(rope.dims // 2)]
    numbers = dict(rope.scaling)
    if rope.type == "linear":
        return [rate / numbers["factor"] for rate in found]
    if rope.type == "llama3":
        return [_llama3_rate(rate, numbers) for rate in found]
    if rope.type == "yarn":
        return [_yarn_rate(i, rate, rope, numbers) for i, rate in enumerate(found)]
    return found


def _llama3_rate(rate: float, numbers: dict[str, float]) -> float:
    turns = numbers["original_max_position_embeddings"] * rate / (2 * math.pi)
    if turns > numbers["high_freq_factor"]:
        return rate
    if turns < numbers["low_freq_factor"]:
        return rate / numbers["factor"]
    kept = (turns - numbers["low_freq_factor"]) / (numbers["high_freq_factor"] - numbers["low_freq_factor"])
    return rate * kept + rate / numbers["factor"] * (1 - kept)


def _yarn_rate(pair: int, rate: float, rope: Rope, numbers: dict[str, float]) -> float:
    """Solved for the pair whose turns over the original length equal each bound."""
    bounds = []
    for turns, rounded in ((numbers["beta_fast"], math.floor), (numbers["beta_slow"], math.ceil)):
        wavelength = numbers["original_max_position_embeddings"] / turns
        place = math.log(wavelength / (2 * math.pi), rope.theta) * rope.dims / 2
        bounds.append(float(rounded(place)) if numbers["truncate"] else place)
    low, high = max(bounds[0], 0.0), min(bounds[1], rope.dims - 1.0)
    slowed = min(max((pair - low) / (high - low), 0.0), 1.0)
    return rate * (1 - slowed) + rate / numbers["factor"] * slowed


def pair_of(rope: Rope, i: int) -> tuple[int, int]:
    """The two dimensions that turn together."""
    return (2 * i, 2 * i + 1) if rope.interleaved else (i, i + rope.dims // 2)


def turn(vector: Tensor, position: int, rope: Rope) -> Tensor:
    """Rotate each pair of one head vector by position * its rate, and stretch it by yarn's attention factor."""
    out = vector.clone()
    stretch = dict(rope.scaling).get("attention_factor", 1.0)
    for i, rate in enumerate(rates(rope)):
        left, right = pair_of(rope, i)
        cos, sin = math.cos(position * rate) * stretch, math.sin(position * rate) * stretch
        out[left] = vector[left] * cos - vector[right] * sin
        out[right] = vector[right] * cos + vector[left] * sin
    return out


def turn_rows(rows: Tensor, positions: list[int], rope: Rope) -> Tensor:
    """`turn` for each row, by complex multiplication; test_drafter_backbone checks it against `turn`."""
    pairs = [pair_of(rope, i) for i in range(rope.dims // 2)]
    left, right = ([pair[side] for pair in pairs] for side in (0, 1))
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * torch.tensor(rates(rope))
    stretch = torch.full_like(angles, dict(rope.scaling).get("attention_factor", 1.0))
    turned = torch.complex(rows[:, left], rows[:, right]) * torch.polar(stretch, angles)
    out = rows.clone()
    out[:, left], out[:, right] = turned.real, turned.imag
    return out


def convolve(part: Weights, name: str, rows: Tensor, source: Tensor, side: int) -> Tensor:
    """Each row of one block [S, H] mixed with those before it; kernels from `source` [S, H], the sublayer's input."""
    base = part[f"{name}.base_kernel"][side]
    size, hidden = base.shape
    own = (source @ part[f"{name}.kernel_projection.weight"].T).view(len(rows), 2, size, -1)[:, side]
    width = hidden // own.shape[-1]
    out = torch.zeros_like(rows)
    for t in range(len(rows)):
        for offset in range(min(size, t + 1)):
            for group in range(hidden // width):
                channels = slice(group * width, (group + 1) * width)
                out[t, channels] += (base[offset, channels] + own[t, offset, group]) * rows[t - offset, channels]
    return out


def block_rows(weights: Weights, spec: DrafterSpec, embedding: Tensor, token: int) -> Tensor:
    """[S, H] the block of one anchor's token, embedded."""
    table = weights.get("embed_tokens.weight", embedding)
    mask = weights["mask_embedding"] if spec.mask_embedding else table[spec.mask_token_id]
    return torch.stack([table[token], *[mask] * (spec.block_size - 1)]) * spec.input_embedding_scale


def slot_logits(weights: Weights, spec: DrafterSpec, hidden: Tensor, head: Tensor) -> Tensor:
    """[D, rows of the head] of one block's hidden states [S, H]."""
    logits = hidden[1 - spec.shift :] @ weights.get("lm_head.weight", head).T * spec.output_multiplier
    cap = spec.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def selector_scores(weights: Weights, spec: DrafterSpec, hidden: Tensor, logits: Tensor, previous: int) -> dict[int, float]:
    """Candidate -> score, for one slot's hidden state [H] and logits [V] after the token `previous`."""
    best = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))[: spec.selector_top_k]
    projected = weights["candidate_selector.hidden_projection.weight"] @ hidden
    left = weights["candidate_selector.predecessor_codebook"][previous] * projected
    return {token: float(logits[token] + left @ weights["candidate_selector.successor_codebook"][token]) for token in best}


def propose(weights: Weights, spec: DrafterSpec, hidden: Tensor, head: Tensor, token: int) -> list[int]:
    """The target's ids that one block drafts greedily, from its hidden states [S, H] and its anchor's token."""
    logits, path, previous = slot_logits(weights, spec, hidden, head), [], token
    for slot, row in enumerate(logits):
        if spec.family == "dflash2":
            scores = selector_scores(weights, spec, hidden[1 - spec.shift + slot], row, previous)
            previous = max(scores, key=lambda candidate: scores[candidate])
        else:
            best = int(row.argmax())
            previous = best + int(weights["d2t"][best]) if spec.draft_vocab_size is not None else best
        path.append(previous)
    return path


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
        inner = convolve(part, "attention_conv", h, h, 0) if spec.conv_kernel_size else h
        out = attend(part, spec, seen, context, inner, positions)
        x = x + (convolve(part, "attention_conv", out, h, 1) if spec.conv_kernel_size else out)
        h = norm(x, part["post_attention_layernorm.weight"], eps)
        inner = convolve(part, "mlp_conv", h, h, 0) if spec.conv_kernel_size else h
        gate = inner @ part["mlp.gate_proj.weight"].T
        out = (gate * torch.sigmoid(gate) * (inner @ part["mlp.up_proj.weight"].T)) @ part["mlp.down_proj.weight"].T
        x = x + (convolve(part, "mlp_conv", out, h, 1) if spec.conv_kernel_size else out)
    return norm(x, weights["norm.weight"], eps)


def attend(part: Weights, spec: DrafterSpec, seen: Tensor, context: Tensor, h: Tensor, positions: list[int]) -> Tensor:
    rows = torch.cat([context, h])
    outs = []
    for head in range(spec.num_heads):
        kv = head // (spec.num_heads // spec.num_kv_heads)
        q = norm(project(part, "q_proj", h, head, spec.head_dim), part["self_attn.q_norm.weight"], spec.rms_norm_eps)
        k = norm(project(part, "k_proj", rows, kv, spec.head_dim), part["self_attn.k_norm.weight"], spec.rms_norm_eps)
        v = project(part, "v_proj", rows, kv, spec.head_dim)
        q = turn_rows(q, positions[len(context) :], spec.rope)
        k = turn_rows(k, positions, spec.rope)
        scores = (q @ k.T / math.sqrt(spec.head_dim)).masked_fill(~seen, -math.inf)
        outs.append(torch.softmax(scores, dim=-1) @ v)
    out = torch.cat(outs, dim=1) @ part["self_attn.o_proj.weight"].T
    return out + part["self_attn.o_proj.bias"] if spec.attention_bias else out


def project(part: Weights, name: str, rows: Tensor, head: int, width: int) -> Tensor:
    heads = slice(head * width, (head + 1) * width)
    out = rows @ part[f"self_attn.{name}.weight"][heads].T
    return out + part[f"self_attn.{name}.bias"][heads] if f"self_attn.{name}.bias" in part else out
