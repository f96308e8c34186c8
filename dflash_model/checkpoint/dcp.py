"""Directories of torch.distributed.checkpoint: `.metadata` names tensors and chunks, shard files hold the chunks.

`.metadata` is a pickle (torch itself loads it with plain pickle; here it is read symbolically). Each chunk is a complete
little torch.save zip at [offset, offset + length) of a shard file, so the reader of those files reads it too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from dflash_model.checkpoint.dcp_metadata import METADATA_NAME, DcpMetadata, ShardedTensor, StoredItem, read_dcp_metadata
from dflash_model.checkpoint.directory import ByteDirectory, check_plain_name
from dflash_model.checkpoint.dtypes import ITEM_BYTES, as_integers
from dflash_model.checkpoint.source import BLOCK_BYTES, Window
from dflash_model.checkpoint.table import dotted
from dflash_model.checkpoint.torch_file import TorchFile, read_torch_file
from dflash_model.checkpoint.torch_tensor import PathKey, Refusal
from dflash_model.errors import CheckpointError

MAX_PLAIN_ITEMS = 64
MAX_PLAIN_ITEM_BYTES = 1 << 20
_DAMAGED = "Save or copy the whole checkpoint directory again."


class DcpCheckpoint:
    """An indexed torch.distributed.checkpoint directory (a `TensorTable`)."""

    format = "dcp"

    def __init__(self, directory: ByteDirectory, metadata: DcpMetadata) -> None:
        """The tensors of `metadata`, whose chunks lie in `directory`."""
        self._directory = directory
        self._metadata = metadata

    @property
    def name(self) -> str:
        """The directory's name."""
        return self._directory.name

    @property
    def size_bytes(self) -> int:
        """Bytes of .metadata and of every shard file that it names. Raises CheckpointError where one is missing."""
        names = [METADATA_NAME, *self.shard_names()]
        return sum(self._directory.open(check_plain_name(name, self.name)).size_bytes for name in names)

    def by_path(self) -> dict[PathKey, ShardedTensor]:
        """Every readable tensor by its path."""
        return self._metadata.tensors

    def tensors(self) -> dict[str, ShardedTensor]:
        """Every readable tensor by its dotted name."""
        return {entry.name: entry for entry in self._metadata.tensors.values()}

    def refused(self) -> dict[PathKey, Refusal]:
        """Every tensor that cannot be read, and why."""
        return self._metadata.refused

    def plain(self) -> Any:
        """Small objects beside the tensors (step, arguments) as nested JSON objects; the topmost 64 of them."""
        rendered: dict[str, Any] = {}
        objects = sorted(self._metadata.objects.items(), key=lambda pair: (len(pair[0]), pair[0]))
        for path, item in objects[:MAX_PLAIN_ITEMS]:
            if item.transformed or item.length > MAX_PLAIN_ITEM_BYTES or not path:
                continue
            place = rendered
            for part in path[:-1]:
                inner = place.setdefault(part, {})
                place = inner if isinstance(inner, dict) else {}
            try:
                place[path[-1]] = self._open_item(item).plain()
            except CheckpointError as exc:
                place[path[-1]] = {"__type__": f"unreadable: {exc.problem}"}
        return rendered

    def content_digest(self) -> str:
        """sha256 (hex) over every item's own digest: names and places from .metadata, content by the items' CRC32s."""
        digests = [
            [dotted(path), list(item.offsets), self._open_item(item).content_digest()]
            for path, item in sorted(self._metadata.items(), key=lambda pair: (pair[0], pair[1].offsets))
        ]
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def shard_names(self) -> list[str]:
        """Sorted names of the shard files that tensors and objects lie in."""
        return sorted({item.file for _, item in self._metadata.items()})

    def check_extents(self) -> None:
        """Raise CheckpointError unless every item lies inside its shard file. Nothing is read."""
        for _, item in self._metadata.items():
            self._window(item)

    def prepare(self, entries: list[ShardedTensor]) -> None:
        """Nothing: each chunk is its own little file."""

    def foresee(self, entries: list[ShardedTensor]) -> None:
        """Nothing: where a chunk's bytes lie is found out when its turn comes."""

    def has_checksums(self, entries: list[ShardedTensor]) -> bool:
        """False: whether a chunk has a CRC32 is found out when its turn comes."""
        return False

    def blocks(self, entry: ShardedTensor) -> Iterator[bytes]:
        """The full tensor's elements in order; each chunk is checked against its CRC32. Raises CheckpointError.

        Chunks that split the first dimension only are streamed; other layouts are put together in memory.
        """
        slabs = _slabs(entry)
        if slabs is None:
            yield from self._assembled(entry)
            return
        for chunk in slabs:
            yield from self._chunk_blocks(entry, chunk)

    def _assembled(self, entry: ShardedTensor) -> Iterator[bytes]:
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.shape):
            raise CheckpointError(f"The chunks of {entry.name} in {self.name} do not add up to the tensor.", _DAMAGED)
        item = ITEM_BYTES[entry.dtype]
        full = np.zeros(entry.shape, dtype=as_integers(b"", item).dtype)
        covered = np.zeros(entry.shape, dtype=np.bool_)
        for chunk in entry.chunks:
            place = tuple(slice(begin, begin + size) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if covered[place].any():
                raise CheckpointError(f"Two chunks of {entry.name} in {self.name} overlap.", _DAMAGED)
            covered[place] = True
            full[place] = as_integers(b"".join(self._chunk_blocks(entry, chunk)), item).reshape(chunk.sizes)
        elements, step = full.reshape(-1), BLOCK_BYTES // item
        for begin in range(0, len(elements), step):
            yield elements[begin : begin + step].tobytes()

    def _chunk_blocks(self, entry: ShardedTensor, chunk: StoredItem) -> Iterator[bytes]:
        file = self._open_item(chunk)
        tensor = file.by_path().get(())
        refusal = file.refused().get(())
        if refusal is not None:
            raise CheckpointError(f"{entry.name} in {self.name} {refusal.reason}.", refusal.fix)
        if tensor is None or tensor.dtype != entry.dtype or tensor.shape != chunk.sizes:
            found = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "no tensor"
            raise CheckpointError(
                f"{file.name} holds {found} where .metadata claims {entry.dtype} {list(chunk.sizes)} of {entry.name}.", _DAMAGED
            )
        return file.blocks(tensor)

    def _open_item(self, item: StoredItem) -> TorchFile:
        return read_torch_file(self._window(item))

    def _window(self, item: StoredItem) -> Window:
        source = self._directory.open(check_plain_name(item.file, f"{self.name}/{METADATA_NAME}"))
        return Window(
            source, item.offset, size_bytes=item.length, name=f"{source.name}[{item.offset}:{item.offset + item.length}]"
        )


def _slabs(entry: ShardedTensor) -> list[StoredItem] | None:
    """The chunks in order if they split the first dimension without gap or overlap, else None."""
    slabs = sorted(entry.chunks, key=lambda chunk: chunk.offsets)
    if not entry.shape:
        return slabs if len(slabs) == 1 else None
    row = 0
    for chunk in slabs:
        if any(chunk.offsets[1:]) or chunk.sizes[1:] != entry.shape[1:] or chunk.offsets[0] != row:
            return None
        row += chunk.sizes[0]
    return slabs if row == entry.shape[0] else None


def read_dcp(directory: ByteDirectory) -> DcpCheckpoint:
    """Index a torch.distributed.checkpoint directory. Raises CheckpointError where .metadata is missing or damaged."""
    return DcpCheckpoint(directory, read_dcp_metadata(directory))
