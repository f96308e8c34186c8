"""The old, non-zip form of torch.save: five pickles in a row, then the storages.

The pickles are a magic number, a version, facts about the writing machine, the object and the list of storage keys. Each
storage is an int64 element count and its data, in the order of that list; nothing carries a checksum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, cast

from dflash_model.checkpoint.dtypes import STORAGE_ITEM_BYTES
from dflash_model.checkpoint.source import ByteSource, read_many
from dflash_model.checkpoint.symbolic import DEFAULT_LIMITS, load_symbolic
from dflash_model.checkpoint.symbols import Global, Key, Members, Node, PersistentId
from dflash_model.errors import CheckpointError

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_COUNT_BYTES = 8
_ITEM_BYTES = frozenset(STORAGE_ITEM_BYTES.values())
_READ_AHEAD = 256 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyStorage:
    """One storage of a legacy file."""

    key: str
    """Its name in the pickle."""

    count_offset: int
    """Where its int64 element count stands; the data follows."""

    size_bytes: int
    """Bytes of its data, as the pickle claims them; the count must agree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LegacyFile:
    """What the pickles of a legacy file say."""

    root: Any
    """The saved object, as inert data."""

    storages: dict[str, LegacyStorage]
    """Key -> storage."""


class _Stream:
    """The read, readline and tell that pickletools needs, over a source; it never asks for more than there is."""

    def __init__(self, source: ByteSource) -> None:
        """A stream at the source's start."""
        self._source = source
        self._position = 0
        self._block = b""
        self._block_offset = 0
        self._limit = 0

    def begin_pickle(self, limit: int) -> None:
        """From here on, at most `limit` bytes can be read."""
        self._limit = min(self._position + limit, self._source.size_bytes)

    def tell(self) -> int:
        return self._position

    def read(self, size: int) -> bytes:
        size = min(size, self._limit - self._position)
        begin = self._position - self._block_offset
        if begin + size > len(self._block):
            self._fill(size)
            begin = 0
        self._position += size
        return self._block[begin : begin + size]

    def readline(self) -> bytes:
        """Up to the next newline; lines of pickles are names, so none is longer than what is read ahead."""
        available = min(_READ_AHEAD, self._limit - self._position)
        begin = self._position - self._block_offset
        end = self._block.find(b"\n", begin, begin + available)
        if end < 0:
            self._fill(available)
            begin, end = 0, self._block.find(b"\n", 0, available)
        return self.read(end + 1 - begin if end >= 0 else available)

    def _fill(self, size: int) -> None:
        wanted = min(max(size, _READ_AHEAD), self._source.size_bytes - self._position)
        self._block = self._source.read_at(self._position, wanted)
        self._block_offset = self._position


def read_legacy(source: ByteSource) -> LegacyFile:
    """Read the pickles and lay out the storages; their data is not read. Raises CheckpointError."""
    stream = _Stream(source)
    magic = _next(stream, source, "header")
    if magic != _MAGIC:
        raise CheckpointError(
            f"{source.name} is a pickle, but not one of torch.save.", "Save the drafter's state dict with torch.save."
        )
    version, system = _next(stream, source, "version"), _next(stream, source, "system facts")
    if version != _VERSION:
        raise CheckpointError(f"{source.name} is of an unknown legacy version.", "Load and save it again with a newer torch.")
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise CheckpointError(f"{source.name} was written on a big-endian machine.", "Save it again on a little-endian machine.")
    root = _next(stream, source, "object")
    keys = _next(stream, source, "storage list")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise CheckpointError(f"{source.name} has a storage list that torch never writes.", "Copy the checkpoint again.")
    return LegacyFile(root=root, storages=_lay_out(keys, _claimed_sizes(root, source), stream.tell(), source))


def _next(stream: _Stream, source: ByteSource, part: str) -> Any:
    stream.begin_pickle(DEFAULT_LIMITS.pickle_bytes)
    return load_symbolic(cast(IO[bytes], stream), what=f"The {part} of {source.name}")


def _lay_out(keys: list[str], claims: dict[str, int], offset: int, source: ByteSource) -> dict[str, LegacyStorage]:
    storages: dict[str, LegacyStorage] = {}
    for key in keys:
        if key not in claims:
            raise CheckpointError(f"{source.name} lists a storage {key[:80]!r} that nothing uses.", "Copy the checkpoint again.")
        storages[key] = LegacyStorage(key=key, count_offset=offset, size_bytes=claims[key])
        offset += _COUNT_BYTES + claims[key]
    if offset > source.size_bytes:
        raise CheckpointError(
            f"{source.name} ends early: its storages reach to byte {offset}, it has {source.size_bytes}.",
            "It is truncated or still being written; use a complete checkpoint.",
        )
    return storages


def check_counts(source: ByteSource, storages: Sequence[LegacyStorage]) -> list[int]:
    """Where each storage's data starts. Raises CheckpointError where a count differs from the pickle's."""
    counts = read_many(source, [(storage.count_offset, _COUNT_BYTES) for storage in storages])
    for storage, data in zip(storages, counts, strict=True):
        count = int.from_bytes(data, "little", signed=True)
        # A storage that was first met untyped is counted in bytes, though later tensors claim elements.
        if storage.size_bytes not in (count * item_bytes for item_bytes in _ITEM_BYTES):
            raise CheckpointError(
                f"{source.name} has a storage {storage.key[:80]!r} of {count} elements, not the {storage.size_bytes} bytes "
                "that its pickle claims.",
                "The file is damaged; copy or save the checkpoint again.",
            )
    return [storage.count_offset + _COUNT_BYTES for storage in storages]


def _claimed_sizes(root: object, source: ByteSource) -> dict[str, int]:
    """Storage key -> bytes of every persistent id below `root`, each object visited once."""
    claims: dict[str, int] = {}
    seen: set[int] = set()
    pending = [root]
    while pending:
        value = pending.pop()
        if isinstance(value, str | bytes | int | float | None) or id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case PersistentId(value=("storage", Global() as kind, str() as key, _, int() as numel, *_)):
                size = numel * STORAGE_ITEM_BYTES.get(kind.name, 0)
                if size < 0 or kind.name not in STORAGE_ITEM_BYTES or claims.setdefault(key, size) != size:
                    raise CheckpointError(
                        f"{source.name} describes its storage {key[:80]!r} in a way that cannot be read.",
                        "Load and save it again with a newer torch.",
                    )
            case list() | tuple():
                pending.extend(value)
            case dict():
                pending.extend(value.keys())
                pending.extend(value.values())
            case Members():
                pending.extend(value.items)
            case Key():
                pending.append(value.value)
            case Node():
                pending += [value.called, value.args, value.kwargs, value.state, value.items, value.pairs]
    return claims
