"""safetensors files and sharded directories, by their headers: no tensor is loaded, and nothing in a header is believed.

A file is an 8-byte little-endian header size, a JSON header, then the data. Ranges in the header count from the data's
start and must tile the data exactly: no overlap, no hole, nothing behind the last tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_model.checkpoint.directory import ByteDirectory, LocalDirectory, check_plain_name
from dflash_model.checkpoint.dtypes import ITEM_BYTES
from dflash_model.checkpoint.source import ByteSource, foresee, read_blocks
from dflash_model.checkpoint.torch_tensor import MAX_DIMENSIONS, PathKey, Refusal
from dflash_model.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 << 20
_LENGTH_BYTES = 8
_COPY_AGAIN = "The file is damaged or incomplete; copy or save it again."


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsEntry:
    """One tensor of a safetensors file."""

    name: str
    """Its name in the file."""

    shard: str
    """File name within the directory."""

    dtype: str
    """safetensors dtype name."""

    shape: tuple[int, ...]
    """Sizes; () for a scalar."""

    offset: int
    """First byte of its data in the file."""

    size_bytes: int
    """Bytes of its data."""

    @property
    def path(self) -> PathKey:
        """The name, as a path of one component."""
        return (self.name,)


@dataclass(frozen=True, kw_only=True, slots=True)
class SafetensorsHeader:
    """What a header says, after it was checked against the file's size."""

    entries: dict[str, SafetensorsEntry]
    """Name -> tensor, in the order of the data."""

    metadata: dict[str, str] = field(default_factory=dict)
    """The `__metadata__` texts."""


def read_safetensors_header(source: ByteSource, *, shard: str) -> SafetensorsHeader:
    """Read and check a header; `shard` is the file name that the entries carry. Raises CheckpointError."""
    if source.size_bytes < _LENGTH_BYTES + 2:
        raise CheckpointError(f"{source.name} is too short for a safetensors file.", _COPY_AGAIN)
    length = int.from_bytes(source.read_at(0, _LENGTH_BYTES), "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{source.name} claims a safetensors header of {length} bytes: it is no safetensors file, or has too many tensors.",
            _COPY_AGAIN,
        )
    data_start = _LENGTH_BYTES + length
    if data_start > source.size_bytes:
        raise CheckpointError(f"{source.name} ends inside its safetensors header.", _COPY_AGAIN)
    header = _parse_json(source.read_at(_LENGTH_BYTES, length), source.name)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{source.name} has safetensors metadata that is not text.", _COPY_AGAIN)
    entries = [_entry(name, value, shard=shard, data_start=data_start, file=source.name) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.size_bytes))
    _check_tiling(entries, data_start, source)
    return SafetensorsHeader(entries={entry.name: entry for entry in entries}, metadata=metadata)


def _parse_json(data: bytes, name: str) -> dict[str, Any]:
    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name stands twice")
        return found

    try:
        value = json.loads(data, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{name} has a header that is not JSON ({str(exc)[:100]}).", _COPY_AGAIN) from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} has a header that is no JSON object.", _COPY_AGAIN)
    return value


def _entry(name: str, value: Any, *, shard: str, data_start: int, file: str) -> SafetensorsEntry:
    match value:
        case {"dtype": str() as dtype, "shape": list() as shape, "data_offsets": [int() as begin, int() as end]} if all(
            type(number) is int and 0 <= number < 1 << 62 for number in (*shape, begin, end)
        ):
            pass
        case _:
            raise CheckpointError(
                f"{file} describes its tensor {name[:200]!r} in a way that safetensors does not have.", _COPY_AGAIN
            )
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{file} holds {name[:200]!r} of the dtype {dtype[:40]!r}, which is not read here.", "Convert it.")
    if len(shape) > MAX_DIMENSIONS or math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise CheckpointError(
            f"{file} gives {name[:200]!r} {end - begin} bytes, which do not fit {dtype} {shape[:8]}.", _COPY_AGAIN
        )
    return SafetensorsEntry(
        name=name, shard=shard, dtype=dtype, shape=tuple(shape), offset=data_start + begin, size_bytes=end - begin
    )


def _check_tiling(entries: list[SafetensorsEntry], data_start: int, source: ByteSource) -> None:
    position = data_start
    for entry in entries:
        if entry.offset != position:
            fault = "overlaps the tensor before it" if entry.offset < position else "leaves a hole before it"
            raise CheckpointError(f"{source.name} has a tensor {entry.name[:200]!r} that {fault}.", _COPY_AGAIN)
        position += entry.size_bytes
    if position != source.size_bytes:
        fault = "is truncated or still being written" if position > source.size_bytes else "has bytes behind its last tensor"
        raise CheckpointError(
            f"{source.name} {fault}: its tensors end at byte {position}, the file at {source.size_bytes}.", _COPY_AGAIN
        )


class SafetensorsSet:
    """The tensors of one or more safetensors files (a `TensorTable`)."""

    format = "safetensors"

    def __init__(self, name: str, shards: Mapping[str, ByteSource]) -> None:
        """Read every shard's header (file name -> source). Raises CheckpointError, also for a tensor in two shards."""
        self.name = name
        self._shards = shards
        self._entries: dict[str, SafetensorsEntry] = {}
        self.metadata: dict[str, str] = {}
        for shard, source in shards.items():
            header = read_safetensors_header(source, shard=shard)
            for entry in header.entries.values():
                other = self._entries.get(entry.name)
                if other is not None:
                    raise CheckpointError(
                        f"{name} holds {entry.name[:200]!r} in two shards, {other.shard} and {shard}.",
                        "Save the checkpoint again.",
                    )
                self._entries[entry.name] = entry
            self.metadata |= header.metadata
        self._by_path = {entry.path: entry for entry in self._entries.values()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(source.size_bytes for source in self._shards.values())

    def shards(self) -> dict[str, ByteSource]:
        """File name -> source."""
        return dict(self._shards)

    def by_path(self) -> dict[PathKey, SafetensorsEntry]:
        """Every tensor by its path of one component."""
        return self._by_path

    def tensors(self) -> dict[str, SafetensorsEntry]:
        """Every tensor by its name."""
        return dict(self._entries)

    def refused(self) -> dict[PathKey, Refusal]:
        """Nothing: a header with an unreadable tensor is an error."""
        return {}

    def plain(self) -> dict[str, str]:
        """The `__metadata__` texts of all shards."""
        return dict(self.metadata)

    def content_digest(self) -> str:
        """sha256 (hex) over every byte of every shard: the format has no checksums. Raises CheckpointError."""
        digest = hashlib.sha256()
        for shard, source in sorted(self._shards.items()):
            digest.update(f"{shard}\0{source.size_bytes}\0".encode())
            for block in read_blocks(source, 0, source.size_bytes):
                digest.update(block)
        return digest.hexdigest()

    def prepare(self, entries: list[SafetensorsEntry]) -> None:
        """Nothing: the headers say it all."""

    def foresee(self, entries: list[SafetensorsEntry]) -> None:
        """Say that `blocks` of these will be read next, in this order."""
        foresee([(self._shards[entry.shard], entry.offset, entry.size_bytes) for entry in entries])

    def has_checksums(self, entries: list[SafetensorsEntry]) -> bool:
        """False: the format has none."""
        return False

    def blocks(self, entry: SafetensorsEntry) -> Iterator[bytes]:
        """The tensor's elements in order. Raises CheckpointError."""
        return read_blocks(self._shards[entry.shard], entry.offset, entry.size_bytes)


def read_safetensors_set(directory: ByteDirectory) -> SafetensorsSet:
    """Open the index's shards, else the one model.safetensors, of a directory. Raises CheckpointError.

    The index must agree with the shards: every shard there, every key in the shard that it names, no key besides.
    """
    names = directory.names()
    if INDEX_NAME not in names:
        if SINGLE_NAME not in names:
            raise CheckpointError(
                f"{directory.name} has neither {SINGLE_NAME} nor {INDEX_NAME}.", "Give the directory of a complete checkpoint."
            )
        return SafetensorsSet(directory.name, {SINGLE_NAME: directory.open(SINGLE_NAME)})
    weight_map = _read_index(directory)
    shards: dict[str, ByteSource] = {}
    for shard in sorted(set(weight_map.values())):
        if shard not in names:
            raise CheckpointError(f"{directory.name} lacks the shard {shard} that its index names.", "Copy the whole directory.")
        shards[shard] = directory.open(shard)
    found = SafetensorsSet(directory.name, shards)
    tensors = found.tensors()
    for key, shard in weight_map.items():
        entry = tensors.get(key)
        if entry is None or entry.shard != shard:
            where = f"it lies in {entry.shard}" if entry else "no shard has it"
            raise CheckpointError(
                f"{directory.name} has an index that places {key[:200]!r} in {shard}, but {where}.", "Save the checkpoint again."
            )
    extra = next((key for key in tensors if key not in weight_map), None)
    if extra is not None:
        raise CheckpointError(
            f"{directory.name} has a tensor {extra[:200]!r} in {tensors[extra].shard} that its index does not list.",
            "Save the checkpoint again.",
        )
    return found


def _read_index(directory: ByteDirectory) -> dict[str, str]:
    source = directory.open(INDEX_NAME)
    if source.size_bytes > MAX_HEADER_BYTES:
        raise CheckpointError(f"{source.name} is too large for an index.", _COPY_AGAIN)
    weight_map = _parse_json(source.read_at(0, source.size_bytes), source.name).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{source.name} has no weight_map.", _COPY_AGAIN)
    return {key: check_plain_name(shard, source.name) for key, shard in weight_map.items()}


def open_safetensors_dir(path: Path) -> SafetensorsSet:
    """The tensors of a local directory, single or sharded. Its files stay open as long as the set lives.

    Raises CheckpointError where a shard is missing or truncated, and where the index and the shards disagree.
    """
    return read_safetensors_set(LocalDirectory(path))
