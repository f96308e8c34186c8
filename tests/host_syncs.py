"""Counts what would make a GPU's host wait: values asked for, shapes that depend on values, copies to the host.

On a CPU nothing waits, but the same operations run, so they can be counted there. The optimizer's own step counters are
left out: they are scalars that live on the host on every device.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ASKING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::repeat_interleave",
}


class HostSyncs(TorchDispatchMode):
    """While open, counts operations that wait for the device."""

    def __init__(self, *, host_scalars: set[int] | None = None) -> None:
        """`host_scalars`: data_ptr of tensors that live on the host whatever the device."""
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._host = host_scalars or set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        first = args[0] if args else None
        by_mask = name in ("aten::index", "aten::index_put_", "aten::index_put") and any(
            t is not None and t.dtype == torch.bool for t in args[1]
        )
        on_host = isinstance(first, torch.Tensor) and first.data_ptr() in self._host
        if (name in ASKING or by_mask) and not on_host:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def counters_of(*optimizers: torch.optim.Optimizer) -> set[int]:
    """data_ptr of the step counters of `optimizers`."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return {state["step"].data_ptr() for state in states if isinstance(state.get("step"), torch.Tensor)}
