"""A torch.save checkpoint, indexed: its tensors by path, its plain data, its digest. No torch, and nothing is executed.

Indexing reads the zip directory and data.pkl only. Tensors that cannot be read are listed apart: whether that matters
depends on who wants them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_model.checkpoint.gather import StorageReader
from dflash_model.checkpoint.object_tree import find_tensors
from dflash_model.checkpoint.plain import render_plain
from dflash_model.checkpoint.source import ByteSource
from dflash_model.checkpoint.table import dotted
from dflash_model.checkpoint.torch_container import StorageEntry, TorchContainer, open_container
from dflash_model.checkpoint.torch_tensor import Geometry, PathKey, Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """One tensor of a torch.save file."""

    path: PathKey
    """Dict keys and list positions from the top of the file; () where the file is one tensor."""

    geometry: Geometry
    """dtype, shape, stride and offset over the storage."""

    storage: StorageEntry
    """The storage that it is a view of: key, size and CRC32."""

    @property
    def name(self) -> str:
        """The path as one dotted name."""
        return dotted(self.path)

    @property
    def dtype(self) -> str:
        """safetensors dtype name."""
        return self.geometry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; () for a scalar."""
        return self.geometry.shape

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor when it lies alone and in order."""
        return self.geometry.size_bytes


class TorchFile:
    """An indexed torch.save file (a `TensorTable`)."""

    def __init__(self, container: TorchContainer) -> None:
        """Index the container's object. Raises CheckpointError where it nests beyond reason."""
        self._container = container
        self._reader = StorageReader(container)
        found = find_tensors(container.root, container.source.name)
        self._tensors: dict[PathKey, TensorEntry] = {}
        self._refused = dict(found.refused)
        for path, geometry in found.readable.items():
            storage = container.storage(geometry.storage_key)
            if storage is None:
                self._refused[path] = Refusal("has no data in the file: its storage is missing", "Copy the checkpoint again.")
            elif storage.size_bytes != geometry.storage_bytes:
                self._refused[path] = Refusal(
                    f"has a storage of {storage.size_bytes} bytes where its pickle claims {geometry.storage_bytes}",
                    "The file is damaged; copy or save the checkpoint again.",
                )
            else:
                self._tensors[path] = TensorEntry(path=path, geometry=geometry, storage=storage)

    @property
    def name(self) -> str:
        """The source's name."""
        return self._container.source.name

    @property
    def format(self) -> str:
        """ "torch-zip" or "torch-legacy"."""
        return self._container.format

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._container.source.size_bytes

    def by_path(self) -> dict[PathKey, TensorEntry]:
        """Every readable tensor by its path, in the file's order."""
        return self._tensors

    def tensors(self) -> dict[str, TensorEntry]:
        """Every readable tensor by its dotted name; of two that share one (a dotted key beside nested dicts), the last."""
        return {entry.name: entry for entry in self._tensors.values()}

    def refused(self) -> dict[PathKey, Refusal]:
        """Every tensor that cannot be read (sparse, quantized, DTensor, ...), and why."""
        return self._refused

    def plain(self) -> Any:
        """Step, epoch, arguments and whatever else lies beside the tensors, as a JSON value."""
        return render_plain(self._container.root)

    def content_digest(self) -> str:
        """sha256 (hex) over data.pkl and the storages' CRC32s; of the whole file where it has none. Raises CheckpointError."""
        return self._container.content_digest()

    def prepare(self, entries: list[TensorEntry]) -> None:
        """Look up where the data of all these lies, in one round trip where the source can. Raises CheckpointError."""
        self._container.locate([entry.storage.key for entry in entries])

    def foresee(self, entries: list[TensorEntry]) -> None:
        """Say that `blocks` of these will be read next, in this order."""
        self._reader.foresee([(entry.geometry, entry.storage) for entry in entries])

    def has_checksums(self, entries: list[TensorEntry]) -> bool:
        """Whether the storages of all these have a CRC32."""
        return all(entry.storage.crc32 is not None or not entry.size_bytes for entry in entries)

    def storage_range(self, entry: TensorEntry) -> tuple[int, int]:
        """(offset in the file, bytes) of the tensor's storage. Raises CheckpointError."""
        return self._container.locate([entry.storage.key])[0], entry.storage.size_bytes

    def blocks(self, entry: TensorEntry) -> Iterator[bytes]:
        """The tensor's elements in order; its storage is checked against its CRC32. Raises CheckpointError."""
        return self._reader.blocks(entry.geometry, entry.storage, name=entry.name)


def read_torch_file(source: ByteSource) -> TorchFile:
    """Index a torch.save file, zip or legacy. Raises CheckpointError where it is none, incomplete, damaged or refused."""
    return TorchFile(open_container(source))
