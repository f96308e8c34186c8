"""Scoring: hidden rows through the target's head into ranks, log-probabilities and best candidates.

Equal logits go to the lower id, as argmax does on a CPU; torch.topk alone promises no order among equals.
Shapes: R rows, V vocabulary, K kept candidates. Logits exist for a few rows at a time only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_model.replay.records import UNKNOWN, Float32, Int32

LOGITS_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """What the head says about each row; rows that are not finite hold rubbish and are marked so."""

    true_rank: Int32
    """[R] as in SampleRecords."""

    true_logprob: Float32
    """[R]"""

    top_ids: Int32
    """[R, K]"""

    top_logprobs: Float32
    """[R, K]"""

    log_sum_exp: Float32
    """[R]"""

    finite: npt.NDArray[np.bool_]
    """[R] whether every logit is."""


@torch.inference_mode()
def score(hidden: Tensor, head: Tensor, true_ids: Tensor, *, top_k: int, logits_bytes: int = LOGITS_BYTES) -> Scores:
    """Score rows `hidden` [R, H] under `head` [V, H] (same type) against `true_ids` [R] (int64, UNKNOWN where none).

    Logits and all that follows are fp32; at most `logits_bytes` of them exist at once.
    """
    rows = max(1, logits_bytes // (4 * len(head)))
    parts = [
        _score_block((hidden[start : start + rows] @ head.T).float(), true_ids[start : start + rows], top_k)
        for start in range(0, len(hidden), rows)
    ]
    columns = [torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True)]
    rank, logprob, ids, logprobs, log_sum_exp, finite = columns
    return Scores(
        true_rank=rank.astype(np.int32),
        true_logprob=logprob,
        top_ids=ids.astype(np.int32),
        top_logprobs=logprobs,
        log_sum_exp=log_sum_exp,
        finite=finite,
    )


def _score_block(logits: Tensor, true_ids: Tensor, top_k: int) -> tuple[Tensor, ...]:
    finite = torch.isfinite(logits.amin(dim=-1)) & torch.isfinite(logits.amax(dim=-1))
    log_sum_exp = logits.logsumexp(dim=-1)
    known = true_ids != UNKNOWN
    ids = true_ids.clamp(min=0)
    true_logprob = (logits.gather(1, ids[:, None])[:, 0] - log_sum_exp).where(known, torch.nan)
    top_logits, top_ids = best_candidates(logits, top_k)
    among = top_ids == ids[:, None]
    rank = among.int().argmax(dim=-1)
    deep = (known & ~among.any(dim=-1)).nonzero().flatten()
    if len(deep):
        rank[deep] = _full_rank(logits[deep], ids[deep])
    rank = rank.where(known, UNKNOWN)
    return rank, true_logprob, top_ids, top_logits - log_sum_exp[:, None], log_sum_exp, finite


def _full_rank(logits: Tensor, ids: Tensor) -> Tensor:
    """[R] how many entries of each row come before its entry `ids` [R]."""
    chosen = logits.gather(1, ids[:, None])
    rank = (logits > chosen).sum(dim=-1)
    equals = (logits >= chosen).sum(dim=-1) - rank
    for row in (equals > 1).nonzero().flatten().tolist():
        rank[row] += (logits[row, : int(ids[row])] == chosen[row]).sum()
    return rank


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
