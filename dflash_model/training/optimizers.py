"""Muon for the layers' matrices, AdamW for the rest, one schedule for both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dflash_model.training.config import OptimizerConfig
from dflash_model.training.muon import Muon


class Optimizers:
    """Both optimizers of one drafter; which parameter goes where is decided by name and shape."""

    def __init__(self, drafter: nn.Module, config: OptimizerConfig, *, steps: int) -> None:
        self._config, self._steps = config, steps
        self._parameters = dict(drafter.named_parameters())
        matrices = [p for name, p in self._parameters.items() if _by_muon(name, p)]
        others = [p for name, p in self._parameters.items() if not _by_muon(name, p)]
        self.parts: dict[str, torch.optim.Optimizer] = {
            "muon": Muon(matrices, lr=config.muon_lr),
            "adamw": torch.optim.AdamW(others, lr=config.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        }
        self._peaks = {"muon": config.muon_lr, "adamw": config.adamw_lr}

    def step(self, number: int, divisor: Tensor) -> None:
        """Apply the gradients, divided by `divisor`, as step `number` (from 0); then clear them."""
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        for gradient in gradients:
            gradient.div_(divisor)
        if self._config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters.values(), self._config.clip_norm)
        share = rate_share(number, self._steps, warmup=self._config.warmup_steps, final=self._config.final_share)
        for name, optimizer in self.parts.items():
            for group in optimizer.param_groups:
                group["lr"] = self._peaks[name] * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """{muon, adamw}."""
        return {name: optimizer.state_dict() for name, optimizer in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read `state_dict`'s value."""
        for name, optimizer in self.parts.items():
            optimizer.load_state_dict(state[name])


def rate_share(number: int, steps: int, *, warmup: int, final: float) -> float:
    """Share of the peak rate at step `number`: up over `warmup` steps, then down to `final` at the last step."""
    rising = (number + 1) / (warmup + 1)
    falling = 1.0 - (1.0 - final) * max(0, number - warmup) / max(1, steps - 1 - warmup)
    return min(1.0, rising, falling)


def _by_muon(name: str, parameter: Tensor) -> bool:
    return name.startswith("layers.") and parameter.ndim == 2
