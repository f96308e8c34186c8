"""The DFlash backbone in plain torch: explicit masks, SDPA, attribute names equal to the checkpoint's tensor names.

What a reader gets wrong: the context never changes. `fc` and `hidden_norm` make one row per target position, each layer
turns those rows into K and V once per sequence, and only block rows pass through the layers.

Shapes: N context rows, T taps, H hidden, B blocks (one per anchor), S block rows, R rows (B * S, or G * S within a
block), Q/K query/kv heads, G = Q / K, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_model.drafter.convolution import BlockConvolution
from dflash_model.drafter.masks import sees_everything, visible
from dflash_model.drafter.owned import TableOwner
from dflash_model.drafter.rotary import Rotation, rotate, rotation_table
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """K and V of one sequence's context, per layer, with room for one block's before them.

    A block's K/V lie directly before the context's while it attends, so attention reads one slice and nothing is copied.
    """

    keys: tuple[Tensor, ...]
    """Per layer [K, S + N, D], rotated."""

    values: tuple[Tensor, ...]
    """Per layer [K, S + N, D]."""

    block_size: int
    """S."""

    @property
    def length(self) -> int:
        """N: positions 0..N-1 are known."""
        return self.keys[0].shape[1] - self.block_size

    @property
    def size_bytes(self) -> int:
        """Memory of all layers' K and V."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Blocks that share one context."""

    context: Context
    """Their sequence's K and V."""

    anchors: tuple[int, ...]
    """Positions of the blocks' first rows; each sees context positions below its own."""

    rows: tuple[int, ...] | None = None
    """Rows of each block that exist, at least 1; None: all S. What stands past them is not seen, and its output means nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Visit:
    """One block's place in a forward."""

    context: Context
    """Its sequence's K and V."""

    num_keys: int
    """The block's rows and the context rows below its anchor."""

    masks: dict[MaskPolicy, Tensor | None]
    """Additive [G * S, num_keys], rows in the order (shared head, slot); None = everything is visible."""


class Attention(nn.Module):
    """Attention of block rows over [their own block | their sequence's context]."""

    def __init__(self, spec: DrafterSpec, policy: MaskPolicy) -> None:
        """Weights are unset until a state dict is loaded; the same holds for the modules below."""
        super().__init__()
        hidden, head, bias = spec.hidden_size, spec.head_dim, spec.attention_bias
        self.head_dim = head
        self.block_size = spec.block_size
        self.policy = policy
        self.q_proj = nn.Linear(hidden, spec.num_heads * head, bias=bias)
        self.k_proj = nn.Linear(hidden, spec.num_kv_heads * head, bias=bias)
        self.v_proj = nn.Linear(hidden, spec.num_kv_heads * head, bias=bias)
        self.o_proj = nn.Linear(spec.num_heads * head, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head, eps=spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head, eps=spec.rms_norm_eps)

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self.head_dim)

    def keys_values(self, rows: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """K (normed, rotated) and V of context or block rows, each [R, K, D]."""
        keys = self.k_norm(self._heads(self.k_proj(rows)))
        return rotate(keys, *rotation), self._heads(self.v_proj(rows))

    def forward(self, rows: Tensor, rotation: Rotation, layer: int, visits: Sequence[_Visit]) -> Tensor:
        """[R, H] -> [R, H]: the linear maps over all rows at once, the scores block by block."""
        q_RQD = rotate(self.q_norm(self._heads(self.q_proj(rows))), *rotation)  # noqa: N806
        k_RKD, v_RKD = self.keys_values(rows, rotation)  # noqa: N806
        kv_heads, slots, head = k_RKD.shape[1], self.block_size, self.head_dim
        # The query heads that share a kv head become query rows, so that K and V are never repeated.
        q_BKRD = q_RQD.view(-1, slots, kv_heads, q_RQD.shape[1] // kv_heads, head).permute(0, 2, 3, 1, 4).flatten(2, 3)  # noqa: N806
        k_BKSD = k_RKD.view(-1, slots, kv_heads, head).transpose(1, 2)  # noqa: N806
        v_BKSD = v_RKD.view(-1, slots, kv_heads, head).transpose(1, 2)  # noqa: N806
        mixed = [
            self._attend(q_BKRD[block : block + 1], k_BKSD[block], v_BKSD[block], layer, visit)
            for block, visit in enumerate(visits)
        ]
        out_BKRD = torch.cat(mixed)  # noqa: N806
        out = out_BKRD.view(len(out_BKRD), kv_heads, -1, slots, head).permute(0, 3, 1, 2, 4).reshape(len(rows), -1)
        projected: Tensor = self.o_proj(out)
        return projected

    def _attend(self, q_1KRD: Tensor, k_KSD: Tensor, v_KSD: Tensor, layer: int, visit: _Visit) -> Tensor:  # noqa: N803
        """[1, K, G * S, D] of one block, with its K/V written beside its context's."""
        keys, values = visit.context.keys[layer], visit.context.values[layer]
        keys[:, : self.block_size] = k_KSD
        values[:, : self.block_size] = v_KSD
        return F.scaled_dot_product_attention(
            q_1KRD,
            keys.narrow(1, 0, visit.num_keys)[None],
            values.narrow(1, 0, visit.num_keys)[None],
            attn_mask=visit.masks[self.policy],
        )


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: DrafterSpec) -> None:
        """Two maps in, one out, none with a bias."""
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """[R, H] -> [R, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, spec: DrafterSpec, policy: MaskPolicy) -> None:
        """`policy`: what this layer's attention may see."""
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = Attention(spec, policy)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = MLP(spec)
        self.attention_conv = _convolution(spec)
        self.mlp_conv = _convolution(spec)

    def forward(self, rows: Tensor, rotation: Rotation, layer: int, visits: Sequence[_Visit]) -> Tensor:
        """[R, H] -> [R, H]."""
        return self.mix(rows, lambda inner: self.self_attn(inner, rotation, layer, visits))

    def mix(self, rows: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """[R, H] -> [R, H] with `attend` for the attention, whose input is normed (and convolved) block rows."""
        if self.attention_conv is None or self.mlp_conv is None:
            rows = rows + attend(self.input_layernorm(rows))
            out: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
            return out
        inner, kernels = self.attention_conv.before(self.input_layernorm(rows))
        rows = rows + self.attention_conv.after(attend(inner), kernels)
        inner, kernels = self.mlp_conv.before(self.post_attention_layernorm(rows))
        return rows + self.mlp_conv.after(self.mlp(inner), kernels)


def _convolution(spec: DrafterSpec) -> BlockConvolution | None:
    if spec.conv_kernel_size is None or spec.conv_group_size is None:
        return None
    return BlockConvolution(
        spec.hidden_size, block_size=spec.block_size, kernel_size=spec.conv_kernel_size, group_size=spec.conv_group_size
    )


class Drafter(TableOwner):
    """A DFlash or DFlash2 drafter; embedding and head are the target's, unless the spec says that it owns them."""

    def __init__(self, spec: DrafterSpec, *, name: str = "drafter") -> None:
        """`name`: how errors call this drafter, such as its path."""
        super().__init__(spec, name=name)
        self.fc = nn.Linear(spec.num_taps * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec, policy) for policy in spec.layer_masks)
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    @property
    def _stack(self) -> Iterable[Layer]:
        return cast("Iterable[Layer]", self.layers)

    @torch.inference_mode()
    def context_features(self, states: Tensor) -> Tensor:
        """Target hidden states [N, T * H] of any float type, taps in spec order -> context rows [N, H]."""
        out: Tensor = self.hidden_norm(self.fc(states.to(self.dtype)))
        return out

    @torch.inference_mode()
    def context_kv(self, ctx: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per layer K (normed, rotated) and V of context rows `ctx` [N, H] at absolute `positions` [N]; each [N, K, D]."""
        rotation = rotation_table(self.spec.rope, positions, dtype=self.dtype)
        return [layer.self_attn.keys_values(ctx, rotation) for layer in self._stack]

    def context_bytes(self, length: int) -> int:
        """Memory that `make_context` will hold for `length` positions."""
        spec = self.spec
        rows = spec.block_size + length
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * rows * self.dtype.itemsize

    @torch.inference_mode()
    def make_context(self, states: Tensor, *, chunk_rows: int = 1024) -> Context:
        """K and V of positions 0..N-1, from `states` [N, T * H], `chunk_rows` rows at a time."""
        spec, room = self.spec, self.spec.block_size
        shape = (spec.num_kv_heads, room + len(states), spec.head_dim)
        empty = [torch.zeros(shape, dtype=self.dtype, device=self.fc.weight.device) for _ in range(2 * spec.num_layers)]
        keys, values = empty[::2], empty[1::2]
        for start in range(0, len(states), chunk_rows):
            ctx = self.context_features(states[start : start + chunk_rows])
            positions = torch.arange(start, start + len(ctx), device=ctx.device)
            rows = slice(room + start, room + start + len(ctx))
            for layer, (k, v) in enumerate(self.context_kv(ctx, positions)):
                keys[layer][:, rows] = k.transpose(0, 1)
                values[layer][:, rows] = v.transpose(0, 1)
        return Context(keys=tuple(keys), values=tuple(values), block_size=room)

    @torch.inference_mode()
    def forward(self, blocks_BSH: Tensor, groups: Sequence[Group]) -> Tensor:  # noqa: N803
        """Embedded blocks [B, S, H], in the groups' order -> hidden states [B, drafted_tokens, H] ready for the head.

        Output d of a block speaks of the token at its anchor + d + 1, for either shift. Raises ValueError where the
        groups do not fit the blocks or their context.
        """
        anchors = [anchor for group in groups for anchor in group.anchors]
        if blocks_BSH.shape[:2] != (len(anchors), self.spec.block_size):
            raise ValueError(f"blocks {list(blocks_BSH.shape)} for {len(anchors)} anchors of {self.spec.block_size} rows")
        slots = torch.arange(self.spec.block_size, device=blocks_BSH.device)
        positions = (torch.tensor(anchors, device=blocks_BSH.device)[:, None] + slots).flatten()
        rotation = rotation_table(self.spec.rope, positions, dtype=self.dtype)
        visits = self._visits(groups)
        rows = blocks_BSH.to(self.dtype).flatten(0, 1)
        for index, layer in enumerate(self._stack):
            rows = layer(rows, rotation, index, visits)
        out: Tensor = self.norm(rows).view(blocks_BSH.shape)
        return out[:, 1 - self.spec.shift :]

    def _visits(self, groups: Sequence[Group]) -> list[_Visit]:
        size, visits = self.spec.block_size, []
        for group in groups:
            context, counts = group.context, group.rows or (size,) * len(group.anchors)
            if context.block_size != size or not all(0 <= anchor <= context.length for anchor in group.anchors):
                raise ValueError(
                    f"anchors {group.anchors} in blocks of {size} rows for a context of {context.length} rows "
                    f"with room for {context.block_size}"
                )
            for anchor, count in zip(group.anchors, counts, strict=True):
                masks = {policy: self._mask(policy, anchor, count) for policy in set(self.spec.layer_masks)}
                visits.append(_Visit(context=context, num_keys=size + anchor, masks=masks))
        return visits

    def _mask(self, policy: MaskPolicy, anchor: int, count: int) -> Tensor | None:
        """Of one block of which `count` rows exist."""
        slots, shared = self.spec.block_size, self.spec.num_heads // self.spec.num_kv_heads
        if not 1 <= count <= slots:
            raise ValueError(f"{count} rows of a block of {slots}")
        if count == slots and sees_everything(policy, anchor, block_size=slots):
            return None
        positions = torch.tensor([anchor], device=self.fc.weight.device)
        seen = visible(policy, positions, block_size=slots, context_length=anchor)
        # A row that does not exist sees itself, so that it has a softmax; nobody else sees it.
        seen[:, count:slots] = torch.eye(slots, dtype=torch.bool, device=seen.device)[:, count:]
        hidden = torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return hidden.repeat(shared, 1)
