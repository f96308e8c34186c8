"""One torch.save file, zip or legacy, as an object and its storages: what the two forms have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_model.checkpoint.pickle_stack import too_large
from dflash_model.checkpoint.source import ByteSource, HashedSource, read_blocks
from dflash_model.checkpoint.symbolic import DEFAULT_LIMITS, load_symbolic
from dflash_model.checkpoint.torch_legacy import LegacyFile, check_counts, read_legacy
from dflash_model.checkpoint.torch_zip import (
    LOCAL_MAGIC,
    SAVE_AGAIN,
    ZipDirectory,
    locate_data,
    read_records,
    read_zip_directory,
)
from dflash_model.errors import CheckpointError

PICKLE_MAGIC = b"\x80"
_OBJECT = "data.pkl"
_STORAGES = "data/"
_BYTEORDER_BYTES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageEntry:
    """One storage of a file: the bytes that one or more tensors are views of."""

    key: str
    """Its name in the file."""

    size_bytes: int
    """Bytes of its data in the file."""

    crc32: int | None
    """CRC32 of its data, or None where the file has none."""


class TorchContainer(Protocol):
    """A torch.save file whose object has been read, and whose storages have not."""

    @property
    def format(self) -> str:
        """ "torch-zip" or "torch-legacy"."""
        ...

    @property
    def source(self) -> ByteSource:
        """The file."""
        ...

    @property
    def root(self) -> Any:
        """The saved object, as inert data."""
        ...

    def storage(self, key: str) -> StorageEntry | None:
        """The storage of that name, None where the file has none."""
        ...

    def locate(self, keys: Sequence[str]) -> list[int]:
        """Where the data of each storage starts in the file, in one round trip where the source can. Raises CheckpointError."""
        ...

    def content_digest(self) -> str:
        """sha256 (hex) that identifies the content, without reading the storages where checksums stand for them."""
        ...


def open_container(source: ByteSource) -> TorchContainer:
    """Read a torch.save file's directory and object. Raises CheckpointError where it is none, incomplete or refused."""
    head = source.read_at(0, min(4, source.size_bytes))
    if head == LOCAL_MAGIC:
        return ZipContainer(source)
    if head[:1] == PICKLE_MAGIC:
        return LegacyContainer(source)
    if not source.size_bytes:
        raise CheckpointError(f"{source.name} is empty.", "It is still being written, or its disk was full.")
    raise CheckpointError(
        f"{source.name} is no torch.save file: it starts with {head.hex(' ')}.",
        "Give a .pt file of torch.save, a safetensors file, or a checkpoint directory.",
    )


class ZipContainer:
    """The zip form."""

    format = "torch-zip"

    def __init__(self, source: ByteSource) -> None:
        """Read directory and object. Raises CheckpointError."""
        self.source = source
        self._directory = read_zip_directory(source)
        self._prefix = _find_prefix(self._directory, source.name)
        pickle = self._read_pickle()
        self._pickle_sha256 = hashlib.sha256(pickle).hexdigest()
        self.root: Any = load_symbolic(pickle, what=f"data.pkl of {source.name}")
        self._offsets: dict[str, int] = {}

    def _read_pickle(self) -> bytes:
        """data.pkl, once the records around it say that it is one of ours."""
        records, prefix, name = self._directory.records, self._prefix, self.source.name
        if prefix + "constants.pkl" in records or any(record.startswith(prefix + "code/") for record in records):
            raise CheckpointError(f"{name} is a TorchScript program.", "Save the drafter's state dict with torch.save.")
        pickle, order = records[prefix + _OBJECT], records.get(prefix + "byteorder")
        if pickle.size_bytes > DEFAULT_LIMITS.pickle_bytes:
            raise too_large(f"data.pkl of {name}", f"is {pickle.size_bytes} bytes long, more than is read")
        if order is None or order.size_bytes > _BYTEORDER_BYTES:
            return read_records(self.source, self._directory, [pickle])[0]
        found, said = read_records(self.source, self._directory, [pickle, order])
        if said.strip() == b"big":
            raise CheckpointError(f"{name} was written on a big-endian machine.", "Save it again on a little-endian machine.")
        return found

    def storage(self, key: str) -> StorageEntry | None:
        """The storage of that name, None where the file has none."""
        record = self._directory.records.get(f"{self._prefix}{_STORAGES}{key}")
        return StorageEntry(key=key, size_bytes=record.size_bytes, crc32=record.crc32) if record else None

    def locate(self, keys: Sequence[str]) -> list[int]:
        """Where the data of each storage starts in the file; local headers are read once. Raises CheckpointError."""
        unknown = [key for key in dict.fromkeys(keys) if key not in self._offsets]
        records = [self._directory.records[f"{self._prefix}{_STORAGES}{key}"] for key in unknown]
        self._offsets.update(zip(unknown, locate_data(self.source, self._directory, records), strict=True))
        return [self._offsets[key] for key in keys]

    def content_digest(self) -> str:
        """sha256 over data.pkl and every storage's name, size and CRC32; over the whole file where a CRC32 is unknown."""
        prefix = self._prefix + _STORAGES
        storages = sorted(
            (name[len(prefix) :], record.size_bytes, record.crc32)
            for name, record in self._directory.records.items()
            if name.startswith(prefix) and record.size_bytes
        )
        if any(crc is None for _, _, crc in storages):
            return whole_digest(self.source)
        return hashlib.sha256(json.dumps([self._pickle_sha256, storages]).encode()).hexdigest()


class LegacyContainer:
    """The non-zip form."""

    format = "torch-legacy"

    def __init__(self, source: ByteSource) -> None:
        """Read the pickles. Raises CheckpointError."""
        self.source = source
        self._file: LegacyFile = read_legacy(source)
        self.root: Any = self._file.root
        self._offsets: dict[str, int] = {}

    def storage(self, key: str) -> StorageEntry | None:
        """The storage of that name, None where the file has none."""
        found = self._file.storages.get(key)
        return StorageEntry(key=key, size_bytes=found.size_bytes, crc32=None) if found else None

    def locate(self, keys: Sequence[str]) -> list[int]:
        """Where the data of each storage starts in the file; element counts are checked once. Raises CheckpointError."""
        unknown = [key for key in dict.fromkeys(keys) if key not in self._offsets]
        offsets = check_counts(self.source, [self._file.storages[key] for key in unknown])
        self._offsets.update(zip(unknown, offsets, strict=True))
        return [self._offsets[key] for key in keys]

    def content_digest(self) -> str:
        """sha256 of the whole file: this form has no checksums."""
        return whole_digest(self.source)


def whole_digest(source: ByteSource) -> str:
    """sha256 (hex) of all bytes of a source, computed where the file lies if its host can."""
    if isinstance(source, HashedSource):
        return source.sha256()
    digest = hashlib.sha256()
    for block in read_blocks(source, 0, source.size_bytes):
        digest.update(block)
    return digest.hexdigest()


def _find_prefix(directory: ZipDirectory, name: str) -> str:
    """The archive name with its slash, from the one record `<archive>/data.pkl`."""
    found = [record[: -len(_OBJECT)] for record in directory.records if record.endswith("/" + _OBJECT) and record.count("/") == 1]
    if len(found) != 1:
        raise CheckpointError(f"{name} is a zip archive without the one data.pkl that torch.save writes.", SAVE_AGAIN)
    return found[0]
