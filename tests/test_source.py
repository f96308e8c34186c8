"""Byte sources: exact ranges, files opened once, changes noticed."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflash_model.checkpoint.source import (
    BLOCK_BYTES,
    CountedSource,
    LocalFile,
    Window,
    read_blocks,
    read_many,
    refuse_change,
)
from dflash_model.errors import CheckpointError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(100)))
    return file


class OneTrip:
    """A source that answers a batch in one trip, and counts trips."""

    def __init__(self, data: bytes) -> None:
        self.name, self.size_bytes, self.data, self.trips = "far", len(data), data, 0

    def read_at(self, offset: int, size: int) -> bytes:
        self.trips += 1
        return self.data[offset : offset + size]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.trips += 1
        return [self.data[offset : offset + size] for offset, size in ranges]


def test_ranges_are_exact_and_past_the_end_is_an_error(path: Path) -> None:
    with LocalFile(path) as source:
        assert (source.name, source.size_bytes) == (str(path), 100)
        assert source.read_at(10, 5) == bytes(range(10, 15))
        assert source.read_at(100, 0) == b""
        for offset, size in ((99, 2), (-1, 1), (0, -1), (101, 0)):
            with pytest.raises(CheckpointError, match="ends early"):
                source.read_at(offset, size)


def test_a_window_reads_as_a_file_of_its_own(path: Path) -> None:
    with LocalFile(path) as source:
        window = Window(source, 20, size_bytes=10, name="part")
        assert window.read_at(2, 3) == bytes([22, 23, 24])
        with pytest.raises(CheckpointError, match="part ends early"):
            window.read_at(8, 3)
        with pytest.raises(CheckpointError, match="ends early"):
            Window(source, 95, size_bytes=10, name="part")


def test_batches_take_one_trip_where_the_source_can() -> None:
    far = OneTrip(bytes(range(50)))
    counted = CountedSource(far)
    assert read_many(counted, [(0, 2), (40, 3)]) == [b"\x00\x01", bytes([40, 41, 42])]
    assert (far.trips, counted.bytes_read) == (1, 5)


def test_batches_are_single_reads_elsewhere(path: Path) -> None:
    with LocalFile(path) as source:
        assert read_many(source, [(0, 2), (40, 3)]) == [b"\x00\x01", bytes([40, 41, 42])]


def test_blocks_cover_a_range_once(tmp_path: Path) -> None:
    data = os.urandom(2 * BLOCK_BYTES + 17)
    (tmp_path / "f").write_bytes(data)
    with LocalFile(tmp_path / "f") as source:
        blocks = list(read_blocks(source, 5, len(data) - 6))
    assert [len(block) for block in blocks] == [BLOCK_BYTES, BLOCK_BYTES, 11]
    assert b"".join(blocks) == data[5:-1]


def test_an_untouched_file_has_not_changed(path: Path) -> None:
    with LocalFile(path) as source:
        assert source.changed() is None
        refuse_change(source)


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        ("append", "changed its size from 100 to 101"),
        ("overwrite", "was written to"),
        ("replace", "replaced by another file"),
        ("remove", "was removed"),
    ],
)
def test_every_kind_of_change_is_noticed(path: Path, do: str, reason: str) -> None:
    with LocalFile(path) as source:
        if do == "append":
            path.write_bytes(bytes(101))
        elif do == "overwrite":
            with path.open("r+b") as file:
                file.write(b"\xff")
            os.utime(path, ns=(source.mtime_ns, source.mtime_ns + 1))
        elif do == "replace":
            other = path.with_name("other")
            other.write_bytes(bytes(100))
            other.replace(path)
        else:
            path.unlink()
        assert reason in (source.changed() or "")
        counted = CountedSource(source)
        with pytest.raises(CheckpointError, match=reason):
            refuse_change(counted)


def test_a_replaced_file_is_read_to_its_old_end(path: Path) -> None:
    with LocalFile(path) as source:
        other = path.with_name("other")
        other.write_bytes(bytes(500))
        other.replace(path)
        assert source.read_at(0, 100) == bytes(range(100))


def test_a_file_that_shrinks_is_an_error_not_short_data(path: Path) -> None:
    with LocalFile(path) as source:
        os.truncate(path, 50)
        with pytest.raises(CheckpointError, match="cut short"):
            source.read_at(40, 20)


def test_forgotten_files_are_closed(path: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(20):
        LocalFile(path).read_at(0, 1)
    assert count() <= before + 1
    source = LocalFile(path)
    source.close()
    source.close()


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(CheckpointError, match="not a regular file"):
            LocalFile(path)
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        LocalFile(tmp_path / "absent")
