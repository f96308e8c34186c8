"""The loss of DFlash2's candidate selector: which of the head's best is right, given the true token before it.

As speculators trains it: the candidates are the head's best, with the wanted token put in the last place where it is not
among them, and the predecessor is the text's own token, not a drafted one.

Shapes: B rows, N positions, A anchors, D drafted tokens, H hidden, V vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_model.drafter.selector import Candidates, CandidateSelector


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Selected:
    """What the selector did at each output."""

    losses: Tensor
    """[B, A, D] cross-entropy over the candidates, in nats."""

    predicted: Tensor
    """[B, A, D] the best of the head's own candidates, none put in."""


def slots_before(token_ids: Tensor, anchors: Tensor, *, drafted_tokens: int) -> Tensor:
    """[B, A, D] the text's token before each output's own: at anchor + d. `token_ids` [B, N], `anchors` [B, A]."""
    positions = anchors[:, :, None] + torch.arange(drafted_tokens, device=anchors.device)
    return token_ids.gather(1, positions.clamp(max=token_ids.shape[1] - 1).flatten(1)).view_as(positions)


def selector_losses(
    selector: CandidateSelector, hidden: Tensor, logits: Tensor, previous: Tensor, wanted: Tensor, *, top_k: int
) -> Selected:
    """`hidden` [B, A, D, H], `logits` [B, A, D, V] float32, `previous` and `wanted` [B, A, D] target ids."""
    ids = logits.detach().topk(min(top_k, logits.shape[-1]), dim=-1).indices.flatten(0, 1)
    truth = wanted.flatten(0, 1)[..., None]
    found = (ids == truth).any(dim=-1, keepdim=True)
    put_in = torch.cat([ids[..., :-1], torch.where(found, ids[..., -1:], truth)], dim=-1)
    flat = logits.flatten(0, 1)
    projected, before = selector.project(hidden.flatten(0, 1)), previous.flatten(0, 1)
    scores = selector.scores(projected, before, Candidates(ids=put_in, unary=flat.gather(-1, put_in)))
    place = (put_in == truth).int().argmax(dim=-1)
    losses = F.cross_entropy(scores.flatten(0, 1), place.flatten(), reduction="none").view_as(wanted)
    with torch.no_grad():
        own = selector.scores(projected, before, Candidates(ids=ids, unary=flat.gather(-1, ids))).argmax(dim=-1, keepdim=True)
    return Selected(losses=losses, predicted=ids.gather(-1, own)[..., 0].view_as(wanted))
