"""What every checkpoint format comes out as: named tensors whose bytes can be streamed, and the plain data beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeVar

from dflash_model.checkpoint.torch_tensor import PathKey, Refusal


class TableEntry(Protocol):
    """One tensor of a checkpoint."""

    @property
    def path(self) -> PathKey:
        """Dict keys and list positions from the top of the file; of a flat format its one name."""
        ...

    @property
    def dtype(self) -> str:
        """safetensors dtype name."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes; () for a scalar."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor when it lies alone and in order."""
        ...


Entry = TypeVar("Entry", bound=TableEntry)


class TensorTable(Protocol[Entry]):
    """A checkpoint that has been indexed; its tensors' bytes have not been read."""

    @property
    def name(self) -> str:
        """How messages call it."""
        ...

    @property
    def format(self) -> str:
        """ "torch-zip", "torch-legacy", "dcp" or "safetensors"."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of the checkpoint's files."""
        ...

    def by_path(self) -> Mapping[PathKey, Entry]:
        """Every readable tensor by its path, in the file's order."""
        ...

    def refused(self) -> Mapping[PathKey, Refusal]:
        """Every tensor that cannot be read, and why; an error only for those who want it."""
        ...

    def plain(self) -> Any:
        """The data beside the tensors as a JSON value."""
        ...

    def content_digest(self) -> str:
        """sha256 (hex) that identifies the content as cheaply as the format allows."""
        ...

    def prepare(self, entries: list[Entry]) -> None:
        """Look up where the data of all these lies, in one round trip where the source can. Optional, for speed."""
        ...

    def foresee(self, entries: list[Entry]) -> None:
        """Say that `blocks` of these will be read next, in this order. Optional, for speed."""
        ...

    def has_checksums(self, entries: list[Entry]) -> bool:
        """Whether `blocks` compares every byte of these with a checksum that the checkpoint carries."""
        ...

    def blocks(self, entry: Entry) -> Iterator[bytes]:
        """The tensor's elements in order, in blocks of whole elements. Raises CheckpointError, at the latest after the last."""
        ...


def dotted(path: PathKey) -> str:
    """A path as one name; "the file's only object" for the empty path."""
    return ".".join(path) if path else "the file's only object"
