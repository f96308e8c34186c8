"""The candidate selector of DFlash2: it chooses each slot's token among the head's best, given the token before it.

So the slots of a block are no longer independent: a score is conditional on the predecessor, and a draft is a chain.

Shapes: B blocks, D drafted tokens, H hidden, K candidates, V vocabulary, r rank of the codebooks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """The head's best tokens of each slot, before the selector."""

    ids: Tensor
    """[B, D, K] int64."""

    unary: Tensor
    """[B, D, K] float32 logits of the head."""

    def at(self, slot: int) -> Candidates:
        """One slot's, with D = 1."""
        return Candidates(ids=self.ids[:, slot : slot + 1], unary=self.unary[:, slot : slot + 1])


class CandidateSelector(nn.Module):
    """score(c) = unary(c) + <predecessor_codebook[previous] * hidden_projection(hidden), successor_codebook[c]>."""

    def __init__(self, hidden_size: int, *, vocab_size: int, rank: int) -> None:
        """Weights are unset until a state dict is loaded."""
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def project(self, hidden: Tensor) -> Tensor:
        """[B, D, r] of final hidden states [B, D, H]; once a block, whatever the predecessors."""
        projected: Tensor = self.hidden_projection(hidden)
        return projected

    def scores(self, projected: Tensor, previous: Tensor, candidates: Candidates) -> Tensor:
        """[B, D, K] float32, given the tokens `previous` [B, D] (int64) before the slots; a softmax over K makes it a
        distribution."""
        context = self.predecessor_codebook[previous] * projected
        edges = (context[..., None, :] * self.successor_codebook[candidates.ids]).sum(dim=-1)
        return candidates.unary + edges.float()

    def chain(self, projected: Tensor, anchor_ids: Tensor, candidates: Candidates) -> Tensor:
        """[B, D] the greedy draft: each slot's best candidate after the one chosen before it, the anchor's token first."""
        previous, path = anchor_ids[:, None], []
        for slot in range(candidates.ids.shape[1]):
            here = candidates.at(slot)
            best = self.scores(projected[:, slot : slot + 1], previous, here).argmax(dim=-1, keepdim=True)
            previous = here.ids.gather(-1, best)[..., 0]
            path.append(previous)
        return torch.cat(path, dim=1)
