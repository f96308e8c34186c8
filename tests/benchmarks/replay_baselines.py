"""What bench_replay.py compares with: a drafter replayed by a plain script, one block after the other.

A plain script that wants tau under several walks (chain, streaks, trees) walks each request once a walk; at every step it
embeds one block, runs it through the layers, and takes the whole row of logits of every slot. Two of them:
  naive   computes fc, K and V of the whole context again at every step
  cached  computes them once a sequence, which is the best that one block at a time can do
Both are written for speed as a careful reader would write them: functional torch, fused attention, no repeated K or V
where torch can share them, tables laid out once. tests/test_replay_baselines.py holds them to z-lab's recorded lists.

Shapes: N context rows, S block rows, H hidden, D head width, V vocabulary, K kept candidates. Full attention, shift 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_model.drafter.spec import DrafterSpec

KeysValues = list[tuple[Tensor, Tensor]]
"""Per draft layer K (normed, rotated) and V of the context, each [heads, N, D]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What one block said: the same numbers as a record."""

    rank: Tensor
    """[S - 1] candidates above the true token."""

    top_ids: Tensor
    """[S - 1, K] best first."""

    top_logprobs: Tensor
    """[S - 1, K]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence of known tokens and the target's states of it."""

    token_ids: Tensor
    """[N + ...] int64."""

    states: Tensor
    """[N, T * H] target states, taps in the drafter's order."""


class PlainDrafter:
    """One drafter with its target's tables, one block at a time."""

    def __init__(
        self, spec: DrafterSpec, weights: Mapping[str, Tensor], *, embedding: Tensor, head: Tensor, top_k: int = 64
    ) -> None:
        """`weights` by the checkpoint's names; `embedding` [V, H] and `head` [V, H] are the target's."""
        assert spec.shift == 0
        assert all(policy.in_block == "bidirectional" and policy.window is None for policy in spec.layer_masks)
        self.spec, self.weights, self.embedding, self.head, self.top_k = spec, weights, embedding, head, top_k
        self.layers = [
            {name.removeprefix(f"layers.{i}."): w for name, w in weights.items() if name.startswith(f"layers.{i}.")}
            for i in range(spec.num_layers)
        ]
        rates = spec.rope.theta ** (-torch.arange(0, spec.rope.dims, 2, dtype=torch.float32) / spec.rope.dims)
        self.rates = torch.cat([rates, rates])

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(rows, (rows.shape[-1],), weight, self.spec.rms_norm_eps)

    def _turned(self, heads: Tensor, first: int) -> Tensor:
        """Rotate [heads, R, D] at positions first..first + R - 1, rotate-half layout."""
        angles = torch.arange(first, first + heads.shape[1], dtype=torch.float32)[:, None] * self.rates
        half = heads.shape[-1] // 2
        swapped = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
        return heads * angles.cos() + swapped * angles.sin()

    def _heads(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[R, H] -> [heads, R, D]."""
        return F.linear(rows, weight).view(len(rows), -1, self.spec.head_dim).transpose(0, 1)

    def _keys_values(self, part: Mapping[str, Tensor], rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
        keys = self._norm(self._heads(rows, part["self_attn.k_proj.weight"]), part["self_attn.k_norm.weight"])
        return self._turned(keys, first), self._heads(rows, part["self_attn.v_proj.weight"])

    def context(self, states: Tensor) -> KeysValues:
        """K and V of every layer for the context `states` [N, T * H], positions 0..N-1."""
        rows = self._norm(F.linear(states, self.weights["fc.weight"]), self.weights["hidden_norm.weight"])
        return [self._keys_values(part, rows, 0) for part in self.layers]

    def hidden(self, token_id: int, anchor: int, context: KeysValues) -> Tensor:
        """[S, H] final rows of the block at `anchor`, whose first token is `token_id`; `context` holds its N = anchor rows."""
        ids = torch.full((self.spec.block_size,), self.spec.mask_token_id)
        ids[0] = token_id
        rows = F.embedding(ids, self.embedding)
        for part, (keys, values) in zip(self.layers, context, strict=True):
            h = self._norm(rows, part["input_layernorm.weight"])
            queries = self._norm(self._heads(h, part["self_attn.q_proj.weight"]), part["self_attn.q_norm.weight"])
            own_keys, own_values = self._keys_values(part, h, anchor)
            mixed = F.scaled_dot_product_attention(
                self._turned(queries, anchor)[None],
                torch.cat([keys, own_keys], dim=1)[None],
                torch.cat([values, own_values], dim=1)[None],
                enable_gqa=True,
            )
            rows = rows + F.linear(mixed[0].transpose(0, 1).flatten(1), part["self_attn.o_proj.weight"])
            h = self._norm(rows, part["post_attention_layernorm.weight"])
            gated = F.silu(F.linear(h, part["mlp.gate_proj.weight"])) * F.linear(h, part["mlp.up_proj.weight"])
            rows = rows + F.linear(gated, part["mlp.down_proj.weight"])
        return self._norm(rows, self.weights["norm.weight"])

    def block(self, request: Request, anchor: int, context: KeysValues) -> Block:
        """Draft at `anchor` and score the true tokens after it."""
        logits = F.linear(self.hidden(int(request.token_ids[anchor]), anchor, context)[1:], self.head)
        logprobs = logits.log_softmax(dim=-1)
        top_logprobs, top_ids = logprobs.topk(min(self.top_k, logits.shape[1]))
        following = request.token_ids[anchor + 1 : anchor + self.spec.block_size]
        known = logits[: len(following)]
        rank = (known > known.gather(1, following[:, None])).sum(dim=-1)
        return Block(rank=rank, top_ids=top_ids, top_logprobs=top_logprobs)


@torch.inference_mode()
def naive(drafter: PlainDrafter, request: Request, anchors: Sequence[int]) -> list[Block]:
    """Every anchor with its whole context computed anew."""
    return [drafter.block(request, anchor, drafter.context(request.states[:anchor])) for anchor in anchors]


@torch.inference_mode()
def cached(drafter: PlainDrafter, request: Request, anchors: Sequence[int]) -> list[Block]:
    """Every anchor after the other, the context's K and V computed once."""
    whole = drafter.context(request.states)
    return [drafter.block(request, anchor, [(k[:, :anchor], v[:, :anchor]) for k, v in whole]) for anchor in anchors]


Replayer = Callable[[PlainDrafter, Request, Sequence[int]], list[Block]]


def walk_chain(replayer: Replayer, drafter: PlainDrafter, request: Request, *, first: int, end: int, stopped: bool) -> list[int]:
    """Steps of z-lab's loop over a known greedy text: positions `first`..`end` - 1 are the completion.

    The last step counts in full; a request that ends at its limit may start one at its last token.
    """
    steps, anchor = [], first
    while anchor < end and not (stopped and steps and anchor >= end - 1):
        (block,) = replayer(drafter, request, [anchor])
        right = (block.rank == 0).tolist()
        steps.append((right.index(False) if False in right else len(right)) + 1)
        anchor += steps[-1]
    return steps
