"""The zip container of torch.save: its central directory, and where each record's data lies.

torch writes records uncompressed and the directory last, so a file without an end record is truncated or still being
written. A record's data offset stands only in its *local* header: the padding there differs from the directory's.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_model.checkpoint.source import ByteSource, read_many
from dflash_model.errors import CheckpointError

LOCAL_MAGIC = b"PK\x03\x04"
_CENTRAL_MAGIC = b"PK\x01\x02"
_END_MAGIC = b"PK\x05\x06"
_END64_MAGIC = b"PK\x06\x06"
_LOCATOR64_MAGIC = b"PK\x06\x07"
_END_BYTES, _LOCATOR64_BYTES, _END64_BYTES, _CENTRAL_BYTES, _LOCAL_BYTES = 22, 20, 56, 46, 30
_COMMENT_BYTES = 0xFFFF
_IN_ZIP64 = 0xFFFFFFFF
MAX_DIRECTORY_BYTES = 16 << 20
MAX_RECORDS = 200_000

SAVE_AGAIN = "Save the checkpoint again with torch.save."
INCOMPLETE = "It is truncated or still being written; wait for it, or use an earlier checkpoint."


@dataclass(frozen=True, kw_only=True, slots=True)
class ZipRecord:
    """One file inside the zip, as the central directory has it."""

    name: str
    """Full name, `<archive>/data/0`."""

    size_bytes: int
    """Size of its data."""

    crc32: int | None
    """CRC32 of its data; None where the writer did not compute it (0 in the file)."""

    header_offset: int
    """Where its local header starts."""

    compressed: bool
    """Whether a zip tool compressed or encrypted it; torch never does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZipDirectory:
    """The central directory of a zip."""

    records: dict[str, ZipRecord]
    """Name -> record, in the directory's order."""

    data_end: int
    """Where the directory starts: all data lies before it."""


def read_zip_directory(source: ByteSource) -> ZipDirectory:
    """Read end record, zip64 records and central directory: two or three ranges at the file's end. Raises CheckpointError."""
    tail_size = min(source.size_bytes, _END_BYTES + _COMMENT_BYTES + _LOCATOR64_BYTES + _END64_BYTES)
    tail_offset = source.size_bytes - tail_size
    tail = source.read_at(tail_offset, tail_size)
    end = _find_end(tail, source.name)
    disk, start_disk, here, total, size, offset = struct.unpack_from("<4HII", tail, end + 4)
    directory_end = tail_offset + end
    locator = end - _LOCATOR64_BYTES
    if locator >= 0 and tail[locator : locator + 4] == _LOCATOR64_MAGIC:
        directory_end, disk, start_disk, here, total, size, offset = _read_zip64(source, tail[locator:end])
    if disk or start_disk or here != total:
        raise CheckpointError(f"{source.name} is one part of a split zip archive.", SAVE_AGAIN)
    if total > MAX_RECORDS or size > MAX_DIRECTORY_BYTES:
        raise CheckpointError(f"{source.name} holds {total} zip records, more than are read here.", "Save the drafter alone.")
    if offset + size != directory_end:
        raise CheckpointError(
            f"{source.name} has a zip directory that does not end where its end record starts: bytes are missing or were added.",
            INCOMPLETE,
        )
    in_tail = offset >= tail_offset
    data = tail[offset - tail_offset :][:size] if in_tail else source.read_at(offset, size)
    records = _parse_directory(data, source.name, total)
    for record in records.values():
        if record.header_offset + _LOCAL_BYTES + record.size_bytes > offset and not record.compressed:
            raise CheckpointError(f"{source.name} has a record {record.name!r} that reaches past its data.", INCOMPLETE)
    return ZipDirectory(records=records, data_end=offset)


def _find_end(tail: bytes, name: str) -> int:
    position = len(tail) - _END_BYTES
    while (position := tail.rfind(_END_MAGIC, 0, max(position, 0) + 4)) >= 0:
        (comment,) = struct.unpack_from("<H", tail, position + 20) if position + _END_BYTES <= len(tail) else (-1,)
        if position + _END_BYTES + comment == len(tail):
            return position
        position -= 1
    raise CheckpointError(f"{name} has no zip end record.", INCOMPLETE)


def _read_zip64(source: ByteSource, locator: bytes) -> tuple[int, int, int, int, int, int, int]:
    _, offset, _ = struct.unpack_from("<IQI", locator, 4)
    head = source.read_at(offset, _END64_BYTES)
    if head[:4] != _END64_MAGIC:
        raise CheckpointError(f"{source.name} has no zip64 end record where it should be.", INCOMPLETE)
    disk, start_disk, here, total, size, start = struct.unpack_from("<IIQQQQ", head, 16)
    return offset, disk, start_disk, here, total, size, start


def _parse_directory(data: bytes, source_name: str, total: int) -> dict[str, ZipRecord]:
    records: dict[str, ZipRecord] = {}
    position = 0
    for _ in range(total):
        if data[position : position + 4] != _CENTRAL_MAGIC or position + _CENTRAL_BYTES > len(data):
            raise CheckpointError(f"{source_name} has a damaged zip directory.", INCOMPLETE)
        flags, method, _, _, crc, packed, size, name_size, extra_size, comment_size = struct.unpack_from(
            "<HHHHIIIHHH", data, position + 8
        )
        (header_offset,) = struct.unpack_from("<I", data, position + 42)
        extra_start = position + _CENTRAL_BYTES + name_size
        name = data[position + _CENTRAL_BYTES : extra_start].decode("utf-8", "surrogateescape")
        extra = data[extra_start : extra_start + extra_size]
        size, packed, header_offset = _widen(extra, (size, packed, header_offset), f"{source_name} record {name!r}")
        if name in records:
            raise CheckpointError(f"{source_name} has two zip records called {name!r}.", SAVE_AGAIN)
        records[name] = ZipRecord(
            name=name,
            size_bytes=size,
            crc32=crc or None,
            header_offset=header_offset,
            compressed=method != 0 or bool(flags & 1) or packed != size,
        )
        position = extra_start + extra_size + comment_size
    if position != len(data):
        raise CheckpointError(f"{source_name} has a damaged zip directory.", INCOMPLETE)
    return records


def _widen(extra: bytes, fields: tuple[int, int, int], what: str) -> tuple[int, int, int]:
    """Put the 64-bit values of the zip64 extra field where the 32-bit fields say that they are there."""
    if _IN_ZIP64 not in fields:
        return fields
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        if kind == 1 and size >= 8 * fields.count(_IN_ZIP64) and position + 4 + size <= len(extra):
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
            first, second, third = (next(wide) if field == _IN_ZIP64 else field for field in fields)
            return first, second, third
        position += 4 + size
    raise CheckpointError(f"{what} has no 64-bit sizes where they should be.", INCOMPLETE)


def locate_data(source: ByteSource, directory: ZipDirectory, records: Sequence[ZipRecord]) -> list[int]:
    """Where the data of each record starts, from their local headers (one round trip). Raises CheckpointError."""
    for record in records:
        _refuse_compressed(record, source.name)
    sizes = [_LOCAL_BYTES + len(_name_bytes(record)) for record in records]
    headers = read_many(source, [(record.header_offset, size) for record, size in zip(records, sizes, strict=True)])
    offsets = []
    for record, header in zip(records, headers, strict=True):
        flags, method = struct.unpack_from("<HH", header, 6)
        name_size, extra_size = struct.unpack_from("<HH", header, 26)
        if header[:4] != LOCAL_MAGIC or method or flags & 1 or header[_LOCAL_BYTES:] != _name_bytes(record):
            raise CheckpointError(
                f"{source.name} has a local header for {record.name!r} that contradicts its directory.", INCOMPLETE
            )
        offset = record.header_offset + _LOCAL_BYTES + name_size + extra_size
        if offset + record.size_bytes > directory.data_end:
            raise CheckpointError(f"{source.name} has a record {record.name!r} that reaches past its data.", INCOMPLETE)
        offsets.append(offset)
    return offsets


def _name_bytes(record: ZipRecord) -> bytes:
    return record.name.encode("utf-8", "surrogateescape")


def _refuse_compressed(record: ZipRecord, source_name: str) -> None:
    if record.compressed:
        raise CheckpointError(
            f"{source_name} was packed again by a zip tool: its record {record.name!r} is compressed or encrypted.",
            "Use the file that torch.save wrote, or pack it without compression (zip -0).",
        )


def read_records(source: ByteSource, directory: ZipDirectory, records: Sequence[ZipRecord]) -> list[bytes]:
    """The data of small records (two round trips), their CRCs checked where they are known. Raises CheckpointError."""
    offsets = locate_data(source, directory, records)
    contents = read_many(source, [(offset, record.size_bytes) for offset, record in zip(offsets, records, strict=True)])
    for record, data in zip(records, contents, strict=True):
        if record.crc32 is not None and zlib.crc32(data) != record.crc32:
            raise CheckpointError(
                f"{source.name} has a damaged record {record.name!r}: its CRC32 does not match.", "Copy it again."
            )
    return contents
