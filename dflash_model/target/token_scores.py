"""How rows of the last layer score the tokens they should predict: through final norm and head, a block of rows at a time.

Shapes: n rows, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_model.target.tables import Tables

ROW_BLOCK = 128
"""Rows of logits held at once: 128 x 248k x 4 B = 127 MB; 2,048 rows would be 2 GB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenScores:
    """Rows against target tokens, on the CPU."""

    agree: torch.Tensor
    """[n] bool: the target's logit is the largest."""

    best: torch.Tensor
    """[n] log-probability of the best token."""

    true: torch.Tensor
    """[n] log-probability of the target."""

    def gaps(self) -> torch.Tensor:
        """Best log-probability minus the target's, 0 where they agree."""
        return torch.where(self.agree, torch.zeros_like(self.best), self.best - self.true)


def score_rows(rows: torch.Tensor, targets: Sequence[int], tables: Tables, *, normed: bool) -> TokenScores:
    """Row i against target i. Equal logits count for the target: a tie is no disagreement."""
    if tables.head.dtype != torch.float32:
        return _scores_by_vocabulary(rows, targets, tables, normed=normed)
    agree, best, true = [], [], []
    wanted = torch.tensor(list(targets), device=tables.head.device)
    for start in range(0, len(rows), ROW_BLOCK):
        logits = tables.logits(rows[start : start + ROW_BLOCK].to(tables.head.device), normed=normed)
        log_sum = torch.logsumexp(logits, dim=-1)
        largest = logits.max(dim=-1).values
        chosen = logits.gather(1, wanted[start : start + ROW_BLOCK, None])[:, 0]
        agree.append((chosen >= largest).cpu())
        best.append((largest - log_sum).cpu())
        true.append((chosen - log_sum).cpu())
    return TokenScores(agree=torch.cat(agree), best=torch.cat(best), true=torch.cat(true))


def _scores_by_vocabulary(rows: torch.Tensor, targets: Sequence[int], tables: Tables, *, normed: bool) -> TokenScores:
    """All rows at once, the head a block at a time: each of its rows is converted once a sample, however many rows there are."""
    device = tables.head.device
    wanted = torch.tensor(list(targets), device=device)
    largest = torch.full((len(rows),), -torch.inf, device=device)
    log_sum, chosen, start = largest.clone(), largest.clone(), 0
    for logits in tables.logit_blocks(rows.to(device), normed=normed):
        inside = (wanted >= start) & (wanted < start + logits.shape[1])
        chosen[inside] = logits[inside].gather(1, (wanted[inside] - start)[:, None])[:, 0]
        largest = torch.maximum(largest, logits.max(dim=-1).values)
        log_sum = torch.logaddexp(log_sum, torch.logsumexp(logits, dim=-1))
        start += logits.shape[1]
    return TokenScores(agree=(chosen >= largest).cpu(), best=(largest - log_sum).cpu(), true=(chosen - log_sum).cpu())
