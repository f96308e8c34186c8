"""Values of sampled steps, taken off the device without waiting for it: each is read when the next one is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_model.training.drafter_workers import StepSums
from dflash_model.training.slot_metrics import SlotMetrics, metrics_from


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What a sampled step said."""

    step: int
    """Finished steps."""

    loss: float
    """The step's loss in nats."""

    metrics: SlotMetrics
    """Since the sample before."""


class Sampler:
    """Adds up metrics on the device and copies them to the host behind the step that asked for it."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._waiting: tuple[int, Tensor, torch.cuda.Event | None] | None = None

    def add(self, sums: StepSums) -> None:
        """Count one step; asks for no value."""
        self._sums = sums.metrics if self._sums is None else self._sums + sums.metrics

    def take(self, step: int, sums: StepSums) -> Sampled | None:
        """Begin copying what was added since the last call; returns that call's sample, whose copy is long done."""
        before = self.finish()
        assert self._sums is not None
        values = torch.cat([(sums.loss / sums.divisor)[None].float(), self._sums])
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            host.copy_(values, non_blocking=True)
            make_event: Any = torch.cuda.Event
            event = make_event()
            event.record()
            self._waiting = step, host, event
        else:
            self._waiting = step, values, None
        self._sums = None
        return before

    def finish(self) -> Sampled | None:
        """The sample that is still on its way, or None."""
        if self._waiting is None:
            return None
        step, values, event = self._waiting
        if event is not None:
            event.synchronize()
        self._waiting = None
        loss, *sums = values.tolist()
        return Sampled(step=step, loss=loss, metrics=metrics_from(sums))
