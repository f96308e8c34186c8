"""The `.metadata` file of torch.distributed.checkpoint, typed: which tensor consists of which stored chunks.

Everything in it is foreign: sizes are checked for being sizes here, file names where they are opened.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dflash_model.checkpoint.directory import ByteDirectory
from dflash_model.checkpoint.dtypes import FROM_TORCH, ITEM_BYTES
from dflash_model.checkpoint.object_tree import path_part
from dflash_model.checkpoint.symbolic import DEFAULT_LIMITS, load_symbolic
from dflash_model.checkpoint.symbols import Global, Key, Node, attributes
from dflash_model.checkpoint.table import dotted
from dflash_model.checkpoint.torch_tensor import MAX_DIMENSIONS, PathKey, Refusal
from dflash_model.errors import CheckpointError

METADATA_NAME = ".metadata"
_SAVE_AGAIN = "Save the checkpoint again, or convert it with torch.distributed.checkpoint.format_utils."


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredItem:
    """One chunk of a tensor, or one object, at its place in a shard file."""

    file: str
    """Name of the shard file, as .metadata gives it."""

    offset: int
    """First byte in that file."""

    length: int
    """Bytes; they are a complete torch.save file."""

    transformed: bool
    """Whether the writer compressed or encrypted it."""

    offsets: tuple[int, ...] = ()
    """Where the chunk starts in the full tensor."""

    sizes: tuple[int, ...] = ()
    """Sizes of the chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedTensor:
    """One tensor of a distributed checkpoint, in one or more chunks."""

    path: PathKey
    """Dict keys from the top of the saved state, as the planner recorded them."""

    dtype: str
    """safetensors dtype name."""

    shape: tuple[int, ...]
    """Sizes of the full tensor."""

    chunks: tuple[StoredItem, ...]
    """Its chunks, at least one, with their places in the full tensor and in the shard files."""

    @property
    def name(self) -> str:
        """The path as one dotted name."""
        return dotted(self.path)

    @property
    def size_bytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """Everything that .metadata lists."""

    tensors: dict[PathKey, ShardedTensor] = field(default_factory=dict)
    """Path -> tensor."""

    objects: dict[PathKey, StoredItem] = field(default_factory=dict)
    """Path -> object that is no tensor."""

    refused: dict[PathKey, Refusal] = field(default_factory=dict)
    """Path -> why the tensor cannot be read."""

    def items(self) -> Iterator[tuple[PathKey, StoredItem]]:
        """Every stored item with the path that it belongs to."""
        for path, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                yield path, chunk
        yield from self.objects.items()


def read_dcp_metadata(directory: ByteDirectory) -> DcpMetadata:
    """Read `.metadata`. Raises CheckpointError where it is missing, damaged or of an unknown form."""
    source = directory.open(METADATA_NAME)
    if source.size_bytes > DEFAULT_LIMITS.pickle_bytes:
        raise CheckpointError(f"{source.name} is larger than {DEFAULT_LIMITS.pickle_bytes} bytes.", _SAVE_AGAIN)
    root = load_symbolic(source.read_at(0, source.size_bytes), what=source.name)
    fields = attributes(root) if isinstance(root, Node) else {}
    described, stored = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{source.name} is no metadata of torch.distributed.checkpoint.", _SAVE_AGAIN)
    paths = fields.get("planner_data")
    items = _stored_items(stored)
    metadata = DcpMetadata()
    for fqn, description in described.items():
        path = _path(fqn, paths)
        parts = attributes(description) if isinstance(description, Node) else {}
        if "chunks" in parts:
            tensor = _tensor(fqn, path, parts=parts, items=items)
            if isinstance(tensor, Refusal):
                metadata.refused[path] = tensor
            else:
                metadata.tensors[path] = tensor
        elif (fqn, ()) in items:
            metadata.objects[path] = items[fqn, ()]
    return metadata


def _path(fqn: object, paths: object) -> PathKey:
    """The planner's path of a name (its dots may belong to one key), else the name alone."""
    found = paths.get(fqn) if isinstance(paths, dict) and isinstance(fqn, str) else None
    if isinstance(found, tuple) and found:
        return tuple(path_part(part) for part in found)
    return (path_part(fqn),)


def _stored_items(stored: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...]], StoredItem]:
    """(name, offsets in the tensor) -> where it is stored; () stands for objects and scalars."""
    items: dict[tuple[str, tuple[int, ...]], StoredItem] = {}
    for key, info in stored.items():
        index = attributes(key.value) if isinstance(key, Key) and isinstance(key.value, Node) else {}
        place = attributes(info) if isinstance(info, Node) else {}
        offsets = index.get("offset") or ()
        match (index.get("fqn"), place.get("relative_path"), place.get("offset"), place.get("length")):
            case (str() as fqn, str() as file, int() as offset, int() as length) if (
                _sizes(offsets) and offset >= 0 and length >= 0
            ):
                items[fqn, offsets] = StoredItem(
                    file=file, offset=offset, length=length, transformed=place.get("transform_descriptors") is not None
                )
            case _:
                raise CheckpointError("The .metadata file lists an item in a way that torch never writes.", _SAVE_AGAIN)
    return items


def _sizes(value: object) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMENSIONS and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _tensor(
    fqn: object, path: PathKey, *, parts: dict[str, Any], items: dict[tuple[str, tuple[int, ...]], StoredItem]
) -> ShardedTensor | Refusal:
    shape, chunks = parts.get("size"), parts.get("chunks")
    torch_dtype = _dtype_name(parts.get("properties"))
    dtype = FROM_TORCH.get(torch_dtype)
    if dtype is None:
        return Refusal(f"has the dtype {torch_dtype}, which safetensors lacks", "Save it as a dense tensor of a common dtype.")
    if (
        not isinstance(fqn, str)
        or not isinstance(shape, tuple)
        or not _sizes(shape)
        or not isinstance(chunks, list)
        or not chunks
    ):
        return Refusal("is described in a way that torch never writes", _SAVE_AGAIN)
    found: list[StoredItem] = []
    for chunk in chunks:
        place = attributes(chunk) if isinstance(chunk, Node) else {}
        offsets, sizes = place.get("offsets"), place.get("sizes")
        if not isinstance(offsets, tuple) or not isinstance(sizes, tuple) or not _inside(offsets, sizes, shape):
            return Refusal("has a chunk that does not lie inside the tensor", _SAVE_AGAIN)
        item = items.get((fqn, offsets))
        if item is None:
            return Refusal(f"lacks its chunk at {list(offsets)}", "Copy the whole checkpoint directory, with every rank's files.")
        if item.transformed:
            return Refusal("is compressed or encrypted by the writer (transform_descriptors)", "Save it without transforms.")
        if math.prod(sizes) * ITEM_BYTES[dtype] > item.length:
            return Refusal(f"has a chunk at {list(offsets)} that is larger than its stored item", _SAVE_AGAIN)
        found.append(
            StoredItem(file=item.file, offset=item.offset, length=item.length, transformed=False, offsets=offsets, sizes=sizes)
        )
    return ShardedTensor(path=path, dtype=dtype, shape=shape, chunks=tuple(found))


def _inside(offsets: tuple[Any, ...], sizes: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    return (
        _sizes(offsets)
        and _sizes(sizes)
        and len(offsets) == len(sizes) == len(shape)
        and all(begin + size <= whole for begin, size, whole in zip(offsets, sizes, shape, strict=True))
    )


def _dtype_name(properties: object) -> str:
    """The torch dtype in TensorProperties, whose state is a tuple that starts with it (or a dict in other versions)."""
    if not isinstance(properties, Node):
        return "?"
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else attributes(properties).get("dtype")
    return dtype.name if isinstance(dtype, Global) and dtype.module == "torch" else "?"
