"""A safetensors file as a stream: the header first, then each tensor's blocks. Memory is bounded by one block.

The same tensors give the same bytes, whatever file they came from: tensors are sorted by item size (largest first, which
keeps every tensor aligned) and then by name, and the header has no other freedom.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash_model.checkpoint.dtypes import ITEM_BYTES
from dflash_model.errors import CheckpointError, from_os_error

_HEADER_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingTensor:
    """One tensor to be written."""

    name: str
    """Its name in the file."""

    dtype: str
    """safetensors dtype name of what `blocks` yields."""

    shape: tuple[int, ...]
    """Sizes; () for a scalar."""

    blocks: Callable[[], Iterable[bytes]]
    """Called once, when its turn comes: the elements in order."""

    @property
    def size_bytes(self) -> int:
        """Bytes that `blocks` must yield."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """A file that is complete."""

    size_bytes: int
    """Its size."""

    sha256: str
    """64 hex digits, computed while it was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingPiece:
    """A part of the file that can be made without the parts before it: the header, or one tensor."""

    name: str | None
    """The tensor's; None for the header."""

    offset: int
    """Where it begins in the file."""

    size_bytes: int
    """Its length in the file."""

    blocks: Callable[[], Iterable[bytes]]
    """Its bytes in order, as many as `size_bytes`. Raises CheckpointError where they would be more or fewer."""


def safetensors_pieces(tensors: Sequence[OutgoingTensor], metadata: dict[str, str]) -> list[OutgoingPiece]:
    """The file as pieces, in its order and without gaps. Raises ValueError for two tensors of one name or a `__metadata__`."""
    ordered = sorted(tensors, key=lambda tensor: (-ITEM_BYTES[tensor.dtype], tensor.name))
    header = _header(ordered, metadata)
    pieces = [OutgoingPiece(name=None, offset=0, size_bytes=len(header), blocks=lambda: [header])]
    offset = len(header)
    for tensor in ordered:
        blocks = partial(_exactly, tensor)
        pieces.append(OutgoingPiece(name=tensor.name, offset=offset, size_bytes=tensor.size_bytes, blocks=blocks))
        offset += tensor.size_bytes
    return pieces


def safetensors_stream(tensors: Sequence[OutgoingTensor], metadata: dict[str, str]) -> Iterator[bytes]:
    """The bytes of a safetensors file. Raises CheckpointError where a tensor yields more or fewer bytes than its shape needs.

    Raises ValueError as `safetensors_pieces` does.
    """
    for piece in safetensors_pieces(tensors, metadata):
        yield from piece.blocks()


def _exactly(tensor: OutgoingTensor) -> Iterator[bytes]:
    left = tensor.size_bytes
    for block in tensor.blocks():
        left -= len(block)
        if left < 0:
            break
        yield block
    if left:
        fault = "more" if left < 0 else f"{left} bytes less"
        raise CheckpointError(
            f"{tensor.name} yields {fault} than {tensor.dtype} {list(tensor.shape)} needs.", "Copy the checkpoint again."
        )


def stream_size(tensors: Sequence[OutgoingTensor], metadata: dict[str, str]) -> int:
    """How many bytes `safetensors_stream` will yield."""
    last = safetensors_pieces(tensors, metadata)[-1]
    return last.offset + last.size_bytes


def _header(ordered: list[OutgoingTensor], metadata: dict[str, str]) -> bytes:
    if len({tensor.name for tensor in ordered} | {"__metadata__"}) != len(ordered) + 1:
        raise ValueError("two tensors of one name, or one called __metadata__")
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for tensor in ordered:
        end = position + tensor.size_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path, tensors: Sequence[OutgoingTensor], *, metadata: dict[str, str], verify: Callable[[], None] | None = None
) -> WrittenFile:
    """Write a safetensors file whole or not at all: `.part-<pid>` beside it, fsync, rename.

    `verify` is called when everything is written but has no name yet; what it raises leaves no file.
    Raises EvalError: a CheckpointError of the tensors' blocks, or the disk's refusal.
    """
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    digest = hashlib.sha256()
    size = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            for block in safetensors_stream(tensors, metadata):
                file.write(block)
                digest.update(block)
                size += len(block)
            file.flush()
            os.fsync(file.fileno())
        if verify is not None:
            verify()
        part.replace(path)
    except OSError as exc:
        raise from_os_error(exc, f"writing {path}") from exc
    finally:
        with suppress(OSError):  # the error that brought us here says more
            part.unlink()
    return WrittenFile(size_bytes=size, sha256=digest.hexdigest())
