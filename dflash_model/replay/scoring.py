"""Scoring: hidden rows through the drafter's head into ranks, log-probabilities and best candidates.

Equal logits go to the lower id, as argmax does on a CPU. Shapes: B blocks, D drafted tokens, R rows, C rows of the head
(the vocabulary, unless it is reduced), K kept candidates. Logits exist for a few rows at a time only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.candidates import best_candidates
from dflash_model.drafter.selector import Candidates, CandidateSelector
from dflash_model.drafter.tables import NO_ROW, DraftTables
from dflash_model.replay.records import NEVER, UNKNOWN, Float32, Int32

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

    selected_ids: Int32 | None = None
    """[R] as in SampleRecords."""


def kept_candidates(drafter: Drafter, tables: DraftTables, top_k: int) -> int:
    """K: how many candidates a slot's record keeps of the `top_k` wanted."""
    chosen_among = drafter.spec.selector_top_k
    return min(top_k, len(tables.head) if chosen_among is None else chosen_among)


@torch.inference_mode()
def score_blocks(
    drafter: Drafter,
    tables: DraftTables,
    hidden_BDH: Tensor,  # noqa: N803
    anchor_ids: Tensor,
    true_ids: Tensor,
    *,
    top_k: int,
    logits_bytes: int = LOGITS_BYTES,
) -> Scores:
    """Score what `drafter` gave for the blocks of the tokens `anchor_ids` [B] against the target's `true_ids` [B, D].

    Ids are the target's, int64, UNKNOWN where none; rows of the result are in the order (block, slot).
    """
    if drafter.candidate_selector is not None:
        return _score_chains(drafter, drafter.candidate_selector, tables, hidden_BDH, anchor_ids, true_ids, top_k, logits_bytes)
    return score(hidden_BDH.flatten(0, 1), tables, true_ids.flatten(), top_k=top_k, logits_bytes=logits_bytes)


@torch.inference_mode()
def score(hidden: Tensor, tables: DraftTables, true_ids: Tensor, *, top_k: int, logits_bytes: int = LOGITS_BYTES) -> Scores:
    """Score rows `hidden` [R, H], independent of each other, against the target's `true_ids` [R].

    Logits and all that follows are fp32; at most `logits_bytes` of them exist at once.
    """
    true_rows = tables.rows_of(true_ids)
    parts = [
        _score_block(tables.logits(hidden[rows]), true_rows[rows], top_k) for rows in _row_blocks(hidden, tables, logits_bytes)
    ]
    rank, logprob, rows, logprobs, log_sum_exp, finite = (torch.cat(column) for column in zip(*parts, strict=True))
    return _scores(rank, logprob, tables.tokens_of(rows), logprobs, log_sum_exp, finite)


def _row_blocks(hidden: Tensor, tables: DraftTables, logits_bytes: int) -> list[slice]:
    rows = max(1, logits_bytes // (4 * len(tables.head)))
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def _scores(
    rank: Tensor,
    logprob: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    log_sum_exp: Tensor,
    finite: Tensor,
    selected: Tensor | None = None,
) -> Scores:
    return Scores(
        true_rank=_int32(rank),
        true_logprob=logprob.cpu().numpy(),
        top_ids=_int32(ids),
        top_logprobs=logprobs.cpu().numpy(),
        log_sum_exp=log_sum_exp.cpu().numpy(),
        finite=finite.cpu().numpy(),
        selected_ids=None if selected is None else _int32(selected),
    )


def _int32(ids: Tensor) -> Int32:
    found: Int32 = ids.cpu().numpy().astype(np.int32)
    return found


def _score_block(logits: Tensor, true_rows: Tensor, top_k: int) -> tuple[Tensor, ...]:
    finite = _finite(logits)
    log_sum_exp = logits.logsumexp(dim=-1)
    there = true_rows >= 0
    rows = true_rows.clamp(min=0)
    true_logprob = logits.gather(1, rows[:, None])[:, 0] - log_sum_exp
    top_logits, top_rows = best_candidates(logits, top_k)
    among = top_rows == rows[:, None]
    rank = among.int().argmax(dim=-1)
    deep = (there & ~among.any(dim=-1)).nonzero().flatten()
    if len(deep):
        rank[deep] = _full_rank(logits[deep], rows[deep])
    rank, true_logprob = _without_the_absent(rank, true_logprob, true_rows)
    return rank, true_logprob, top_rows, top_logits - log_sum_exp[:, None], log_sum_exp, finite


def _without_the_absent(rank: Tensor, logprob: Tensor, true_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rank and log-probability where there is a true row; what records say of an unknown token and of one never drafted."""
    unknown, never = true_rows == UNKNOWN, true_rows == NO_ROW
    return (
        rank.masked_fill(unknown, UNKNOWN).masked_fill(never, NEVER),
        logprob.masked_fill(unknown, torch.nan).masked_fill(never, -torch.inf),
    )


def _finite(logits: Tensor) -> Tensor:
    """[R] whether all of `logits` [R, C] are."""
    return torch.isfinite(logits.amin(dim=-1)) & torch.isfinite(logits.amax(dim=-1))


def _full_rank(logits: Tensor, ids: Tensor) -> Tensor:
    """[R] how many entries of each row come before its entry `ids` [R]."""
    chosen = logits.gather(1, ids[:, None])
    rank = (logits > chosen).sum(dim=-1)
    equals = (logits >= chosen).sum(dim=-1) - rank
    for row in (equals > 1).nonzero().flatten().tolist():
        rank[row] += (logits[row, : int(ids[row])] == chosen[row]).sum()
    return rank


def _score_chains(
    drafter: Drafter,
    selector: CandidateSelector,
    tables: DraftTables,
    hidden_BDH: Tensor,  # noqa: N803
    anchor_ids: Tensor,
    true_ids: Tensor,
    top_k: int,
    logits_bytes: int,
) -> Scores:
    """Scores of a selector's slots, each given the true token before it; the draft's own where that is unknown.

    A chain reaches a slot only if all before it were true, so slot by slot this decides acceptance exactly.
    """
    candidates, finite = _candidates(drafter, tables, hidden_BDH, logits_bytes)
    projected = selector.project(hidden_BDH)
    path = selector.chain(projected, anchor_ids, candidates)
    before = torch.where(true_ids[:, :-1] == UNKNOWN, path[:, :-1], true_ids[:, :-1])
    scores = selector.scores(projected, torch.cat([anchor_ids[:, None], before], dim=1), candidates).flatten(0, 1)
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ids = candidates.ids.flatten(0, 1).gather(-1, order)
    log_sum_exp = scores.logsumexp(dim=-1)
    among = ids == true_ids.flatten()[:, None]
    rank = among.int().argmax(dim=-1)
    logprob = ordered.gather(-1, rank[:, None])[:, 0] - log_sum_exp
    absent = torch.where(true_ids.flatten() == UNKNOWN, UNKNOWN, NO_ROW)
    rank, logprob = _without_the_absent(rank, logprob, torch.where(among.any(dim=-1), rank, absent))
    kept = slice(kept_candidates(drafter, tables, top_k))
    logprobs = ordered[:, kept] - log_sum_exp[:, None]
    return _scores(rank, logprob, ids[:, kept], logprobs, log_sum_exp, finite & _finite(scores), path.flatten())


def _candidates(drafter: Drafter, tables: DraftTables, hidden_BDH: Tensor, logits_bytes: int) -> tuple[Candidates, Tensor]:  # noqa: N803
    """The head's candidates of each slot, and [R] whether its logits are finite."""
    hidden, wanted = hidden_BDH.flatten(0, 1), drafter.spec.selector_top_k or 1
    values, ids, finite = [], [], []
    for rows in _row_blocks(hidden, tables, logits_bytes):
        logits = tables.logits(hidden[rows])
        best, best_ids = best_candidates(logits, wanted)
        values.append(best)
        ids.append(best_ids)
        finite.append(_finite(logits))
    shape = (*hidden_BDH.shape[:2], -1)
    return Candidates(ids=torch.cat(ids).view(shape), unary=torch.cat(values).view(shape)), torch.cat(finite)
