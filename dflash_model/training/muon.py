"""Muon: momentum whose matrices are made nearly orthogonal before they are applied (Jordan et al., 2024).

torch.optim.Muon iterates in bfloat16, which on a CPU is several times slower than float32 and takes longer than the
drafter's own forward and backward; matrices of one shape are iterated together here, in float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz iteration; they make small singular values grow fastest."""

ITERATIONS = 5
EPSILON = 1e-7


class Muon(torch.optim.Optimizer):
    """For matrices only. State per parameter: momentum_buffer."""

    def __init__(self, parameters: Iterable[Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Nesterov momentum, orthogonalised, scaled by sqrt(max(1, rows / columns))."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer: Tensor = state["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])
                by_shape.setdefault(tuple(parameter.shape), []).append((parameter, update))
            for shape, members in by_shape.items():
                updates = orthogonal(torch.stack([update for _, update in members]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (parameter, _), update in zip(members, updates.unbind(0), strict=True):
                    parameter.add_(update, alpha=-group["lr"] * scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """[M, R, C] -> [M, R, C] with the same singular vectors and singular values near 1."""
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    x = matrices.to(dtype)
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return out
