"""Convolution inside the block: what DFlash2 puts before and after a layer's attention and MLP.

A row is mixed with the rows before it in its own block, never with another block's or the context's. The weights of the
mix are a learnt kernel plus one that the row itself projects, shared by `group_size` channels.

Shapes: B blocks, S block rows, R = B * S, H hidden, G groups, C channels of a group, O offsets (kernel size).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

IN, OUT = 0, 1
"""The two convolutions of a sublayer: of its input, and of its output."""


class BlockConvolution(nn.Module):
    """Both convolutions of one sublayer; one projection of the sublayer's input drives them."""

    def __init__(self, hidden_size: int, *, block_size: int, kernel_size: int, group_size: int) -> None:
        """Weights are unset until a state dict is loaded."""
        super().__init__()
        self.block_size = block_size
        self.kernel_size = kernel_size
        self.groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * self.groups, bias=False)

    def before(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The sublayer's input [R, H], mixed, and the kernels [R, 2, O, G] that `after` needs."""
        kernels = self.kernel_projection(rows).view(-1, 2, self.kernel_size, self.groups)
        return self._mix(rows, kernels, IN), kernels

    def after(self, rows: Tensor, kernels: Tensor) -> Tensor:
        """The sublayer's output [R, H], mixed with the kernels of its input."""
        return self._mix(rows, kernels, OUT)

    def _mix(self, rows: Tensor, kernels: Tensor, side: int) -> Tensor:
        """y_t = sum over o of (base[o] + kernels_t[o]) * x_(t - o), with t and t - o in one block."""
        x_BSGC = rows.view(-1, self.block_size, self.groups, rows.shape[-1] // self.groups)  # noqa: N806
        base_OGC = self.base_kernel[side].view(self.kernel_size, *x_BSGC.shape[2:])  # noqa: N806
        own_BSOG = kernels[:, side].view(*x_BSGC.shape[:2], self.kernel_size, self.groups)  # noqa: N806
        mixed = (base_OGC[0] + own_BSOG[:, :, 0, :, None]) * x_BSGC
        for offset in range(1, min(self.kernel_size, self.block_size)):
            kernel = base_OGC[offset] + own_BSOG[:, offset:, offset, :, None]
            mixed[:, offset:] += kernel * x_BSGC[:, : self.block_size - offset]
        return mixed.view_as(rows)
