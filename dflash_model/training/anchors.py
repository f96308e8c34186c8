"""Anchors of a training step: where blocks start, drawn at random among the supervised positions of each row.

Two published rules differ in which positions may be drawn. Shapes are fixed (rows with too few candidates are filled with
anchors marked invalid), and nothing asks the device for a value.

Shapes: B rows, N positions, A anchors a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NEXT_SUPERVISED = "next_supervised"
"""SpecForge, DeepSpec: a supervised position whose successor, in its own document, is supervised too."""

BLOCK_INSIDE = "block_inside"
"""speculators: a supervised position that is not among the last `block_size` of its row."""

RULES = (NEXT_SUPERVISED, BLOCK_INSIDE)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Anchors:
    """The anchors of one step."""

    positions: Tensor
    """[B, A] int64, ascending among the valid ones; 0 where invalid."""

    valid: Tensor
    """[B, A] bool."""


def candidates(supervised: Tensor, documents: Tensor, *, rule: str, block_size: int) -> Tensor:
    """[B, N] bool: positions that `rule` allows. `supervised` [B, N] bool, `documents` [B, N] with -1 for padding.

    Raises ValueError for an unknown rule.
    """
    allowed = supervised & (documents >= 0)
    if rule == NEXT_SUPERVISED:
        follows = supervised[:, 1:] & (documents[:, 1:] == documents[:, :-1])
        return torch.cat([allowed[:, :-1] & follows, torch.zeros_like(allowed[:, :1])], dim=1)
    if rule == BLOCK_INSIDE:
        inside = torch.arange(supervised.shape[1], device=supervised.device) < supervised.shape[1] - block_size
        return allowed & inside
    raise ValueError(f"anchor rule {rule!r}, expected one of {RULES}")


def draw_anchors(
    supervised: Tensor, documents: Tensor, *, count: int, rule: str, block_size: int, generator: torch.Generator
) -> Anchors:
    """`count` distinct anchors a row, uniform among its candidates; the draw depends on `generator` (on the CPU) alone."""
    allowed = candidates(supervised, documents, rule=rule, block_size=block_size)
    drawn = torch.rand(allowed.shape, generator=generator).to(allowed.device, non_blocking=True)
    width = allowed.shape[1]
    best, where = torch.where(allowed, drawn, -1.0).topk(min(count, width), dim=1)
    positions = torch.where(best >= 0, where, width).sort(dim=1).values
    valid = positions < width
    return Anchors(positions=positions.where(valid, 0), valid=valid)
