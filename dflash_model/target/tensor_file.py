"""Small safetensors files of our own: written whole or not at all, read with one kind of error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dflash_model.checkpoint.safetensors_writer import OutgoingTensor, write_safetensors
from dflash_model.errors import InputError, StorageError, from_os_error

BLOCK_BYTES = 4 << 20
_DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.int64: "I64"}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str]) -> None:
    """Write tensors in their own dtype: whole or not at all, and the same bytes for the same content. Raises EvalError.

    Not by safetensors' own writer: it puts the metadata in random order, and an artifact's digest covers the bytes.
    """
    outgoing = [
        OutgoingTensor(name=name, dtype=_DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), blocks=partial(_blocks, tensor))
        for name, tensor in tensors.items()
    ]
    write_safetensors(path, outgoing, metadata=dict(metadata))


def _blocks(tensor: torch.Tensor) -> Iterator[bytes]:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    for start in range(0, len(flat), BLOCK_BYTES):
        yield flat[start : start + BLOCK_BYTES].tobytes()


def read_tensors(path: Path, *, kind: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors (CPU, stored dtype) and the metadata of one of our files.

    `kind` is what the file should be ("target tables"), for the message. Raises InputError where it is not there,
    StorageError where it is damaged.
    """
    if not path.is_file():
        raise InputError(f"There is no {kind} file at {path}.", "Check the path, or run the stage that writes it.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    except SafetensorError as exc:
        raise StorageError(
            f"{path} is not a readable {kind} file: {exc}.", "Delete it and run the stage that writes it again."
        ) from exc
    return tensors, metadata
