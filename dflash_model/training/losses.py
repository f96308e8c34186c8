"""Labels, slot weights and loss of a training step, in each published form.

Output d of a block speaks of the token at anchor + d + 1. With the slots of the papers (k = d + 1 where slot 0 is
dropped, k = d where it is kept and everything shifted) both published decays are exp(-d / gamma).

Shapes: B rows, N positions, A anchors, D drafted tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_model.training.anchors import Anchors

DATA, VERIFIER_BEST, VERIFIER = "data", "verifier_best", "verifier"
LABELS = (DATA, VERIFIER_BEST, VERIFIER)
"""data: the text's own token (SpecForge). verifier_best: the argmax of the verifier's logits (speculators, cross-entropy).
verifier: the verifier's whole distribution, by Kullback-Leibler divergence (speculators, default)."""

BY_WEIGHT, BY_COUNT = "weights", "count"
"""The loss divided by the sum of weights (SpecForge, DeepSpec) or by the number of supervised slots (speculators)."""

INDIVIDUAL, PREFIX = "individual", "prefix"
"""Each unsupervised slot masked on its own (SpecForge, speculators), or all from the first one on (DeepSpec)."""

COUNT_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class LossForm:
    """How slots are weighted and what they are compared with."""

    labels: str = DATA
    """One of LABELS."""

    gamma: float | None = 4.0
    """Decay of the weights, in slots; None: every slot weighs the same."""

    normalised_by: str = BY_WEIGHT
    """BY_WEIGHT or BY_COUNT."""

    later_slots: str = INDIVIDUAL
    """INDIVIDUAL or PREFIX."""

    hard_label_shift: int = 0
    """0. 1 is a known bug: output d is compared with the token at anchor + d + 2."""

    verifier_shift: int = 0
    """0: the verifier's row at anchor + d. 1 is a known bug: the row at anchor + d + 1, which predicts the next token."""

    def __post_init__(self) -> None:
        """ValueError for values outside the fields' docs."""
        known = (
            (self.labels, LABELS),
            (self.normalised_by, (BY_WEIGHT, BY_COUNT)),
            (self.later_slots, (INDIVIDUAL, PREFIX)),
            (self.hard_label_shift, (0, 1)),
            (self.verifier_shift, (0, 1)),
        )
        for value, allowed in known:
            if value not in allowed:
                raise ValueError(f"{value!r}, expected one of {allowed}")
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"gamma {self.gamma}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slots:
    """What the outputs of a step are compared with."""

    ids: Tensor
    """[B, A, D] hard labels; where not supervised, some id."""

    supervised: Tensor
    """[B, A, D] bool."""

    verifier_rows: Tensor
    """[B, A, D] the position whose final state predicts the label."""


def slots_of(
    token_ids: Tensor, supervised: Tensor, documents: Tensor, anchors: Anchors, *, drafted_tokens: int, form: LossForm
) -> Slots:
    """Labels of every output: supervised where the token exists, is supervised and lies in the anchor's document."""
    length = token_ids.shape[1]
    depth = torch.arange(drafted_tokens, device=token_ids.device)
    positions = anchors.positions[:, :, None] + depth + 1
    label_at = positions + form.hard_label_shift
    row_at = positions - 1 + form.verifier_shift
    reach = torch.maximum(label_at, row_at)
    inside = (reach < length) & anchors.valid[:, :, None]
    flat = label_at.clamp(max=length - 1).flatten(1)
    same = documents.gather(1, flat).view_as(positions) == documents.gather(1, anchors.positions)[:, :, None]
    keep = inside & same & supervised.gather(1, flat).view_as(positions)
    if form.later_slots == PREFIX:
        keep = keep.long().cumprod(dim=-1).bool()
    ids = token_ids.gather(1, flat).view_as(positions)
    return Slots(ids=ids, supervised=keep, verifier_rows=row_at.clamp(max=length - 1))


def in_reduced_vocabulary(slots: Slots, row_of: Tensor) -> Slots:
    """`slots` with labels as rows of a reduced head; what it has no row for is not supervised.

    `row_of` [V]: token -> row, negative where there is none.
    """
    rows = row_of[slots.ids]
    return replace(slots, ids=rows.clamp(min=0), supervised=slots.supervised & (rows >= 0))


def slot_weights(form: LossForm, drafted_tokens: int, *, device: torch.device) -> Tensor:
    """[D]: exp(-d / gamma), or ones."""
    depth = torch.arange(drafted_tokens, device=device, dtype=torch.float32)
    return torch.ones_like(depth) if form.gamma is None else torch.exp(-depth / form.gamma)


def slot_losses(logits: Tensor, slots: Slots, form: LossForm, *, verifier_logits: Tensor | None = None) -> Tensor:
    """[B, A, D] loss of each output in nats, whatever it weighs. `logits` and `verifier_logits`: [B, A, D, V], float32."""
    if form.labels == DATA:
        return F.cross_entropy(logits.flatten(0, 2), slots.ids.flatten(), reduction="none").view_as(slots.ids)
    if verifier_logits is None:
        raise ValueError(f"labels {form.labels!r} need the verifier's logits")
    if form.labels == VERIFIER_BEST:
        best = verifier_logits.argmax(dim=-1).flatten()
        return F.cross_entropy(logits.flatten(0, 2), best, reduction="none").view_as(slots.ids)
    wanted = verifier_logits.log_softmax(dim=-1)
    return F.kl_div(logits.log_softmax(dim=-1), wanted, reduction="none", log_target=True).sum(dim=-1)


def reduce_losses(losses: Tensor, slots: Slots, form: LossForm) -> tuple[Tensor, Tensor]:
    """(sum of weighted losses, divisor), both scalars: the step's loss is their quotient, over all workers' sums."""
    weights = slot_weights(form, losses.shape[-1], device=losses.device) * slots.supervised
    total = losses.where(slots.supervised, 0.0).mul(weights).sum()
    if form.normalised_by == BY_COUNT:
        return total, slots.supervised.sum() + COUNT_EPSILON
    return total, weights.sum().clamp(min=COUNT_EPSILON)
