"""Checkpoints that the tests make with torch, and torch's own answer as plain bytes."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import torch

from dflash_model.checkpoint.table import TensorTable

LEGACY = {"_use_new_zipfile_serialization": False}
"""Options of torch.save for the non-zip form."""

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.complex64,
)  # fmt: skip


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in order, as they would lie in a file."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def bytes_in(table: TensorTable[Any], *path: str) -> bytes:
    """The same as the reader gives them."""
    return b"".join(table.blocks(table.by_path()[path]))


UNTYPED = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64})
"""The dtypes that torch saves over untyped storages; torch itself cannot load those from its legacy form."""


def many_tensors(*, without: frozenset[torch.dtype] = frozenset()) -> dict[str, torch.Tensor]:
    """Every dtype but those left out, and every way to lie in a storage."""
    torch.manual_seed(0)
    base = torch.randn(40)
    square = torch.randn(5, 7)
    tensors = {
        f"dtype.{str(dtype).removeprefix('torch.')}": (torch.randn(3, 4) * 50).to(dtype)
        for dtype in DTYPES
        if dtype not in without
    }
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "view": base[3:9],
        "view.again": base[5:30].reshape(5, 5),
        "whole": base,
        "transposed": square.t(),
        "every_other": square[:, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "permuted": torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
        "tied": square,
        "big": torch.randn(1_300_000),  # more than one block of the reader
        "big.transposed": torch.randn(1100, 1200).t(),
    }


def drafter_tensors(*, layers: int = 1, hidden: int = 8, taps: int = 3) -> dict[str, torch.Tensor]:
    """A drafter's state dict in the z-lab layout: 3 + 11 * layers tensors of random numbers."""
    torch.manual_seed(1)
    found = {
        "fc.weight": torch.randn(hidden, taps * hidden),
        "hidden_norm.weight": torch.randn(hidden),
        "norm.weight": torch.randn(hidden),
    }
    for layer in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"layers.{layer}.{name}.weight"] = torch.randn(hidden)
        for name in ("q_norm", "k_norm"):
            found[f"layers.{layer}.self_attn.{name}.weight"] = torch.randn(4)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            found[f"layers.{layer}.self_attn.{name}.weight"] = torch.randn(hidden, hidden)
        for name in ("gate_proj", "up_proj", "down_proj"):
            found[f"layers.{layer}.mlp.{name}.weight"] = torch.randn(hidden, hidden)
    return found


def save(value: Any, path: Path, **options: Any) -> Path:
    """torch.save, and the path."""
    torch.save(value, path, **options)
    return path


def ordered(tensors: dict[str, torch.Tensor], prefix: str = "") -> collections.OrderedDict[str, torch.Tensor]:
    """A state dict as modules make them, with a prefix before every name."""
    return collections.OrderedDict((prefix + name, tensor) for name, tensor in tensors.items())
