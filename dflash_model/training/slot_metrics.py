"""The trainers' own metrics, under teacher forcing at random anchors. They are no tau: see `dflash_model/metrics.py`.

`eal` is published with two meanings. As marginals: the sum over slots of the product of slot accuracies, bonus not
counted (speculators until August 2026). As runs: leading right slots + 1, over the blocks with any supervised slot
(speculators 0.9). Sums are kept on the device; dividing them asks for values, so it is done at sampled steps only.

Shapes: B rows, A anchors, D drafted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotMetrics:
    """What a trainer prints; None where nothing was supervised."""

    slot_accuracy: tuple[float | None, ...]
    """[D] right among the supervised outputs of each slot."""

    full_accuracy: float | None
    """Right among all supervised outputs."""

    eal_marginal: float | None
    """Sum over d of the product of slot accuracies up to d; without the bonus token. Ends before a slot without any output."""

    eal_runs: float | None
    """Mean over blocks of leading right outputs + 1."""


def metric_sums(predicted: Tensor, wanted: Tensor, supervised: Tensor) -> Tensor:
    """[2 D + 2] float32: right per slot, supervised per slot, sum of runs + 1, blocks. All arguments [B, A, D]."""
    right = (predicted == wanted) & supervised
    runs = right.long().cumprod(dim=-1).sum(dim=-1) + 1
    blocks = supervised.any(dim=-1)
    parts = [right.sum(dim=(0, 1)), supervised.sum(dim=(0, 1)), (runs * blocks).sum()[None], blocks.sum()[None]]
    return torch.cat(parts).float()


def metrics_from(sums: Sequence[float]) -> SlotMetrics:
    """The metrics of added-up `metric_sums`."""
    depth = (len(sums) - 2) // 2
    right, seen = sums[:depth], sums[depth : 2 * depth]
    runs, blocks = sums[2 * depth :]
    accuracy = tuple(r / s if s else None for r, s in zip(right, seen, strict=True))
    return SlotMetrics(
        slot_accuracy=accuracy,
        full_accuracy=sum(right) / sum(seen) if sum(seen) else None,
        eal_marginal=_marginal_length(accuracy),
        eal_runs=runs / blocks if blocks else None,
    )


def _marginal_length(accuracy: Sequence[float | None]) -> float | None:
    if not accuracy or accuracy[0] is None:
        return None
    length, product = 0.0, 1.0
    for value in accuracy:
        if value is None:
            break
        product *= value
        length += product
    return length
