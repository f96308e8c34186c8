"""Tensors as streams of bytes: contiguous ones block by block, strided ones gathered through numpy.

A storage's CRC32 covers all of it. Where a tensor is its whole storage, the check rides along with the read; otherwise the
storage is read once more, and only once however many tensors share it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from dflash_model.checkpoint.dtypes import ITEM_BYTES, as_integers
from dflash_model.checkpoint.source import BLOCK_BYTES, ByteSource, foresee, read_blocks
from dflash_model.checkpoint.torch_container import StorageEntry, TorchContainer
from dflash_model.checkpoint.torch_tensor import Geometry
from dflash_model.errors import CheckpointError


class StorageReader:
    """Reads tensors out of the storages of one file, and remembers which storages proved intact."""

    def __init__(self, container: TorchContainer) -> None:
        """A reader that has checked nothing yet."""
        self._container = container
        self._intact: set[str] = set()

    def blocks(self, geometry: Geometry, storage: StorageEntry, *, name: str) -> Iterator[bytes]:
        """The elements in order, in blocks of whole elements; `name` is the tensor's in messages.

        Raises CheckpointError where the storage does not match its CRC32, at the latest after the last block.
        """
        if geometry.numel == 0:
            return
        source = self._container.source
        (data_offset,) = self._container.locate([storage.key])
        first, size = geometry.span
        whole = (first, size) == (0, storage.size_bytes)
        if not whole:
            self._check_alone(source, data_offset, storage, name)
        crc = 0
        if geometry.contiguous:
            for block in read_blocks(source, data_offset + first, size):
                crc = zlib.crc32(block, crc) if whole else 0
                yield block
        else:
            span = b"".join(read_blocks(source, data_offset + first, size))
            crc = zlib.crc32(span) if whole else 0
            yield from strided_blocks(span, geometry)
        if whole:
            self._compare(crc, storage, name)

    def foresee(self, tensors: Sequence[tuple[Geometry, StorageEntry]]) -> None:
        """Tell the source which ranges `blocks` of these will read, in this order. Raises CheckpointError."""
        source, checked, ranges = self._container.source, set(self._intact), []
        offsets = self._container.locate([storage.key for _, storage in tensors])
        for (geometry, storage), data_offset in zip(tensors, offsets, strict=True):
            if geometry.numel == 0:
                continue
            first, size = geometry.span
            if (first, size) != (0, storage.size_bytes) and storage.crc32 is not None and storage.key not in checked:
                ranges.append((source, data_offset, storage.size_bytes))
            checked.add(storage.key)
            ranges.append((source, data_offset + first, size))
        foresee(ranges)

    def _check_alone(self, source: ByteSource, data_offset: int, storage: StorageEntry, name: str) -> None:
        if storage.crc32 is None or storage.key in self._intact:
            return
        crc = 0
        for block in read_blocks(source, data_offset, storage.size_bytes):
            crc = zlib.crc32(block, crc)
        self._compare(crc, storage, name)

    def _compare(self, crc: int, storage: StorageEntry, name: str) -> None:
        if storage.crc32 is not None and crc != storage.crc32:
            raise CheckpointError(
                f"{name} in {self._container.source.name} is damaged: the CRC32 of its storage {storage.key!r} does not match.",
                "Copy the checkpoint again, or use another step.",
            )
        self._intact.add(storage.key)


def strided_blocks(span: bytes, geometry: Geometry) -> Iterator[bytes]:
    """The elements of a strided tensor in order; `span` is exactly the storage's part that `Geometry.span` names."""
    item = ITEM_BYTES[geometry.dtype]
    # The stride of a dimension of one means nothing, and may be any number.
    strides = tuple(step * item if size > 1 else 0 for size, step in zip(geometry.shape, geometry.stride, strict=True))
    view = np.lib.stride_tricks.as_strided(as_integers(span, item), geometry.shape, strides, writeable=False)
    row_bytes = math.prod(geometry.shape[1:]) * item
    rows = max(1, BLOCK_BYTES // row_bytes)
    for begin in range(0, geometry.shape[0], rows):
        yield view[begin : begin + rows].tobytes()
