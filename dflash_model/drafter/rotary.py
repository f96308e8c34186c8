"""Rotary: the rotation that a `Rope` describes, as cos and sin per position, and how it turns q and k.

Frequencies are those of transformers (`modeling_rope_utils`), in fp32 and in its order of operations: a rate that is one
bit off moves an angle at position 100,000 by a hundredth. Texts have one position per token, so sections change nothing.

Shapes: N positions, R rows, D head width.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_model.drafter.spec import Rope


class Rotation(NamedTuple):
    """cos and sin of some positions, and how the rotated dimensions pair up."""

    cos: Tensor
    """[N, dims], times yarn's attention factor."""

    sin: Tensor
    """[N, dims], likewise."""

    interleaved: bool = False
    """Pairs are (2 i, 2 i + 1), not (i, i + dims / 2)."""


def rotation_table(rope: Rope, positions: Tensor, *, dtype: torch.dtype) -> Rotation:
    """The rotation of absolute `positions` [N], computed in fp32 and given in `dtype`."""
    angles = positions.float()[:, None] * _rates_on(rope, positions.device)
    angles = angles.repeat_interleave(2, dim=-1) if rope.interleaved else torch.cat([angles, angles], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    factor = frequencies(rope)[1]
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return Rotation(cos.to(dtype), sin.to(dtype), rope.interleaved)


def rotate(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor, interleaved: bool = False) -> Tensor:  # noqa: N803
    """Rotate the leading cos_RD.shape[-1] dimensions of each head; [R, heads, D]."""
    dims = cos_RD.shape[-1]
    turned, kept = x_RHD[..., :dims], x_RHD[..., dims:]
    if interleaved:
        swapped = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    else:
        left, right = turned.chunk(2, dim=-1)
        swapped = torch.cat([-right, left], dim=-1)
    turned = turned * cos_RD[:, None] + swapped * sin_RD[:, None]
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


@functools.lru_cache(maxsize=64)
def _rates_on(rope: Rope, device: torch.device) -> Tensor:
    """[dims / 2] on `device`; kept, because a copy from host to device in every forward would wait for it."""
    with torch.inference_mode(False):
        return torch.tensor(frequencies(rope)[0], dtype=torch.float32, device=device)


@functools.lru_cache(maxsize=64)
def frequencies(rope: Rope) -> tuple[tuple[float, ...], float]:
    """(radians per position of each pair [dims / 2], what cos and sin are multiplied with)."""
    scaling = dict(rope.scaling)
    powers = rope.theta ** (torch.arange(0, rope.dims, 2, dtype=torch.float32) / rope.dims)
    rates = 1.0 / powers
    if rope.type == "linear":
        rates = rates / scaling["factor"]
    elif rope.type == "llama3":
        rates = _llama3(rates, scaling)
    elif rope.type == "yarn":
        rates = _yarn(powers, rope, scaling)
    return tuple(rates.tolist()), scaling.get("attention_factor", 1.0)


def _llama3(rates: Tensor, scaling: dict[str, float]) -> Tensor:
    """Slow rates are divided by the factor, fast ones stay, those between are blended by their wavelength."""
    original, low, high = (scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    wavelengths = 2 * math.pi / rates
    slowed = torch.where(wavelengths > original / low, rates / scaling["factor"], rates)
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * slowed / scaling["factor"] + share * slowed
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, slowed)


def _yarn(powers: Tensor, rope: Rope, scaling: dict[str, float]) -> Tensor:
    """Rates that turn often stay, those that turn seldom are divided by the factor, a ramp lies between.

    Formula: YaRN (arXiv 2309.00071), section 3.2, in transformers' reading of its bounds.
    """
    original = scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """Which pair makes that many turns over the original length."""
        return rope.dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling["beta_fast"]), dimension(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dims // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling["factor"] * powers) * (1 - kept) + 1.0 / powers * kept
