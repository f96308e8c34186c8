"""Drafter-training workers: one replica per device, each with a shard of the rows; their gradients are added in order.

A step asks no device for a value: loss and metrics stay there as sums, and are copied at sampled steps only.

Shapes: B rows, N positions, A anchors, D drafted tokens, T taps, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_model.drafter.backbone import Drafter
from dflash_model.target.tables import Tables
from dflash_model.training.anchors import Anchors
from dflash_model.training.block_masks import Layout
from dflash_model.training.forward import hidden_states
from dflash_model.training.losses import DATA, LossForm, in_reduced_vocabulary, reduce_losses, slot_losses, slots_of
from dflash_model.training.selector_loss import selector_losses, slots_before
from dflash_model.training.slot_metrics import metric_sums


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepInput:
    """Everything a drafter worker needs of a step, for all rows or a shard of them."""

    step: int
    """From 0."""

    tokens: int
    """Real tokens in all rows."""

    token_ids: Tensor
    """[B, N]."""

    supervised: Tensor
    """[B, N] bool."""

    documents: Tensor
    """[B, N], -1 for padding."""

    anchors: Tensor
    """[B, A]."""

    anchors_valid: Tensor
    """[B, A] bool."""

    states: Tensor
    """[B, N, T * H]."""

    final: Tensor
    """[B, N, H]."""

    def shard(self, rows: slice, device: torch.device) -> StepInput:
        """Some of the rows, on `device`."""
        tensors = {
            name: getattr(self, name)[rows].to(device, non_blocking=True)
            for name in ("token_ids", "supervised", "documents", "anchors", "anchors_valid", "states", "final")
        }
        return StepInput(step=self.step, tokens=self.tokens, **tensors)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSums:
    """What a step leaves behind, on the device."""

    loss: Tensor
    """Sum of weighted losses."""

    divisor: Tensor
    """What it is divided by."""

    metrics: Tensor
    """[2 D + 2], as `slot_metrics.metric_sums`."""

    def __add__(self, other: StepSums) -> StepSums:
        """Sums of two shards, on the first one's device."""
        device = self.loss.device
        return StepSums(
            loss=self.loss + other.loss.to(device),
            divisor=self.divisor + other.divisor.to(device),
            metrics=self.metrics + other.metrics.to(device),
        )


class Replica:
    """A drafter on one device, with the target's tables beside it."""

    def __init__(
        self,
        drafter: Drafter,
        tables: Tables,
        *,
        head: Tensor,
        form: LossForm,
        backend: str,
        context_past_anchor: int,
    ) -> None:
        """`head` [V, H] scores the outputs; the verifier's labels come from the tables' own."""
        self.drafter, self.tables, self._form, self._backend = drafter, tables, form, backend
        self._past = context_past_anchor
        self._draft_tables = drafter.tables(tables.embed, head)
        vocabulary = torch.arange(len(tables.head), device=head.device)
        self._row_of = None if self._draft_tables.target_ids is None else self._draft_tables.rows_of(vocabulary)

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self._draft_tables.head.device

    def gradients(self, given: StepInput) -> StepSums:
        """Add the gradient of the summed (not yet divided) loss to the drafter's."""
        spec = self.drafter.spec
        layout = Layout(
            anchors=given.anchors,
            documents=given.documents,
            block_size=spec.block_size,
            context_past_anchor=self._past,
        )
        tables = self._draft_tables
        hidden = hidden_states(self.drafter, given.states, given.token_ids, layout, tables=tables, backend=self._backend)
        slots = slots_of(
            given.token_ids,
            given.supervised,
            given.documents,
            Anchors(positions=given.anchors, valid=given.anchors_valid),
            drafted_tokens=spec.drafted_tokens,
            form=self._form,
        )
        labels = slots if self._row_of is None else in_reduced_vocabulary(slots, self._row_of)
        logits = tables.logits(hidden)
        verifier, wanted = None, labels.ids
        if self._form.labels != DATA:
            verifier = self._verifier_logits(given.final, slots.verifier_rows)
            wanted = verifier.argmax(dim=-1)
        losses = slot_losses(logits, labels, self._form, verifier_logits=verifier)
        predicted = logits.argmax(dim=-1)
        selector = self.drafter.candidate_selector
        if selector is not None:
            previous = slots_before(given.token_ids, given.anchors, drafted_tokens=spec.drafted_tokens)
            chosen = selector_losses(selector, hidden, logits, previous, wanted, top_k=spec.selector_top_k or 1)
            losses, predicted = losses + chosen.losses, chosen.predicted
        total, divisor = reduce_losses(losses, labels, self._form)
        torch.autograd.backward(total)
        with torch.no_grad():
            sums = metric_sums(predicted, wanted, labels.supervised)
        return StepSums(loss=total.detach(), divisor=divisor, metrics=sums)

    def _verifier_logits(self, final: Tensor, rows: Tensor) -> Tensor:
        with torch.no_grad():
            flat = rows.flatten(1)[:, :, None].expand(-1, -1, final.shape[-1])
            logits = self.tables.logits(final.gather(1, flat).flatten(0, 1))
            kept = self._draft_tables.target_ids
            return (logits if kept is None else logits[:, kept]).view(*rows.shape, -1)


class DrafterWorkers:
    """All replicas; the first is the one that is optimised and saved."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.first, self._others = replicas[0], list(replicas[1:])
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self._others)), thread_name_prefix="drafter")

    def gradients(self, given: StepInput) -> StepSums:
        """Gradients of all rows, added up on the first replica in the order of the shards."""
        rows = len(given.token_ids)
        count = 1 + len(self._others)
        bounds = [rows * index // count for index in range(count + 1)]
        waiting = [
            self._pool.submit(self._shard_gradients, replica, given, slice(bounds[i], bounds[i + 1]))
            for i, replica in enumerate(self._others, start=1)
        ]
        sums = self._shard_gradients(self.first, given, slice(0, bounds[1]))
        for replica, future in zip(self._others, waiting, strict=True):
            sums = sums + future.result()
            for mine, theirs in zip(self.first.drafter.parameters(), replica.drafter.parameters(), strict=True):
                if theirs.grad is not None:
                    moved = theirs.grad.to(mine.device, non_blocking=True)
                    mine.grad = moved.clone() if mine.grad is None else mine.grad.add_(moved)
        return sums

    @staticmethod
    def _shard_gradients(replica: Replica, given: StepInput, rows: slice) -> StepSums:
        return replica.gradients(given.shard(rows, replica.device))

    def spread(self) -> None:
        """Give the first replica's weights to the others, and clear their gradients."""
        with torch.no_grad():
            for replica in self._others:
                for theirs, mine in zip(replica.drafter.parameters(), self.first.drafter.parameters(), strict=True):
                    theirs.copy_(mine, non_blocking=True)
                replica.drafter.zero_grad(set_to_none=True)

    def close(self) -> None:
        """End the workers' threads."""
        self._pool.shutdown(wait=True)


def copy_to(drafter: Drafter, device: torch.device) -> Drafter:
    """A copy of `drafter` on `device`."""
    return copy.deepcopy(drafter).to(device)
