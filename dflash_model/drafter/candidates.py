"""Candidates: the best entries of a row of logits, in one order everywhere.

Equal logits go to the lower id, as argmax does on a CPU; torch.topk alone promises no order among equals.
"""

from __future__ import annotations

from torch import Tensor


def best_candidates(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Values and ids, each [R, min(top_k, V)], of the best entries of `logits` [R, V]: best first, equals by lower id."""
    kept = min(top_k, logits.shape[1])
    values, ids = logits.topk(min(kept + 1, logits.shape[1]), dim=-1)
    tied = (values[:, 1:] == values[:, :-1]).any(dim=-1)
    values, ids = values[:, :kept], ids[:, :kept]
    for row in tied.nonzero().flatten().tolist():
        # topk orders equals as it likes, and at its cut may keep a higher id than one it drops.
        ordered, order = logits[row].sort(descending=True, stable=True)
        values[row], ids[row] = ordered[:kept], order[:kept]
    return values, ids
