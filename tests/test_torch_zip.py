"""The zip container: offsets from local headers, zip64, and what a truncated or repacked file says."""

import struct
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_model.checkpoint.source import CountedSource, LocalFile
from dflash_model.checkpoint.symbolic import DEFAULT_LIMITS
from dflash_model.checkpoint.torch_file import read_torch_file
from dflash_model.checkpoint.torch_zip import locate_data, read_records, read_zip_directory
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import bytes_in, bytes_of, save


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save({"a": torch.arange(100.0), "b": torch.arange(7)}, tmp_path / "c.pt")


def test_records_agree_with_pythons_zipfile(path: Path) -> None:
    with LocalFile(path) as source, zipfile.ZipFile(path) as oracle:
        directory = read_zip_directory(source)
        assert list(directory.records) == oracle.namelist()
        for name, record in directory.records.items():
            info = oracle.getinfo(name)
            assert (record.size_bytes, record.crc32, record.header_offset) == (info.file_size, info.CRC, info.header_offset)
            assert read_records(source, directory, [record]) == [oracle.read(name)]


def test_the_directorys_padding_would_give_a_wrong_offset(path: Path) -> None:
    with LocalFile(path) as source, zipfile.ZipFile(path) as oracle:
        directory = read_zip_directory(source)
        record = directory.records["c/data/0"]
        (offset,) = locate_data(source, directory, [record])
        assert source.read_at(offset, record.size_bytes) == bytes_of(torch.arange(100.0))
        by_directory = record.header_offset + 30 + len(record.name) + len(oracle.getinfo(record.name).extra)
        assert by_directory != offset
        assert offset % 64 == 0


def test_a_tensor_behind_four_gibibytes_is_found(tmp_path: Path) -> None:
    path = tmp_path / "large.pt"
    with torch.serialization.skip_data():  # reserves the space: a sparse file
        torch.save({"hole": torch.empty(1_150_000_000), "behind": torch.empty(5)}, path)
    assert path.stat().st_blocks * 512 < 10_000_000 < 4 << 30 < path.stat().st_size
    with zipfile.ZipFile(path) as oracle:
        header = oracle.getinfo("large/data/1").header_offset
    with path.open("r+b") as file:
        file.seek(header + 26)
        name_size, extra_size = struct.unpack("<HH", file.read(4))
        file.seek(name_size + extra_size, 1)
        file.write(bytes_of(torch.tensor([1.0, 2, 3, 4, 5])))
    assert header > 4 << 30
    tracemalloc.start()
    started = time.process_time()
    with LocalFile(path) as source:
        file_ = read_torch_file(source)
        assert bytes_in(file_, "behind") == bytes_of(torch.tensor([1.0, 2, 3, 4, 5]))
        assert file_.tensors()["hole"].size_bytes == 4_600_000_000
        assert file_.tensors()["hole"].storage.crc32 is None
    assert time.process_time() - started < 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5_000_000
    assert torch.equal(torch.load(path, mmap=True)["behind"], torch.tensor([1.0, 2, 3, 4, 5]))


def test_a_file_cut_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    cut = tmp_path / "cut.pt"
    for size in (4, 100, len(data) // 2, len(data) - 200, len(data) - 22, len(data) - 1):
        cut.write_bytes(data[:size])
        with LocalFile(cut) as source, pytest.raises(CheckpointError, match="no zip end record") as caught:
            read_torch_file(source)
        assert "still being written" in caught.value.fix


def test_a_growing_file_becomes_readable_when_its_end_arrives(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    growing = tmp_path / "growing.pt"
    growing.write_bytes(b"")
    readable = []
    for begin in range(0, len(data), len(data) // 5):
        with growing.open("ab") as file:
            file.write(data[begin : begin + len(data) // 5])
        try:
            with LocalFile(growing) as source:
                read_torch_file(source)
            readable.append(True)
        except CheckpointError:
            readable.append(False)
    assert readable[-1]
    assert not any(readable[:-1])


def repacked(path: Path, how: Callable[[zipfile.ZipFile, zipfile.ZipInfo, bytes], None]) -> Path:
    out = path.with_name("repacked.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for record in old.infolist():
            how(new, record, old.read(record))
    return out


def test_a_recompressed_file_is_refused_and_a_stored_one_is_read(path: Path) -> None:
    stored = repacked(path, lambda new, record, data: new.writestr(record.filename, data, zipfile.ZIP_STORED))
    with LocalFile(stored) as source:
        assert bytes_in(read_torch_file(source), "b") == bytes_of(torch.arange(7))
    packed = repacked(path, lambda new, record, data: new.writestr(record.filename, data, zipfile.ZIP_DEFLATED))
    with LocalFile(packed) as source, pytest.raises(CheckpointError, match="packed again by a zip tool"):
        read_torch_file(source)


def test_big_endian_torchscript_and_other_zips_are_refused(path: Path, tmp_path: Path) -> None:
    big = repacked(
        path, lambda new, record, data: new.writestr(record.filename, b"big" if record.filename.endswith("byteorder") else data)
    )
    with LocalFile(big) as source, pytest.raises(CheckpointError, match="big-endian"):
        read_torch_file(source)
    archive = tmp_path / "other.zip"
    for names, reason in (
        (["m/data.pkl", "m/constants.pkl"], "TorchScript"),
        (["m/data.pkl", "m/code/__torch__.py"], "TorchScript"),
        (["array.npy"], "without the one data.pkl"),
        (["a/data.pkl", "b/data.pkl"], "without the one data.pkl"),
    ):
        with zipfile.ZipFile(archive, "w") as new:
            for name in names:
                new.writestr(name, b"N.")
        with LocalFile(archive) as source, pytest.raises(CheckpointError, match=reason):
            read_torch_file(source)


def test_a_pickle_too_long_to_be_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with zipfile.ZipFile(path, "w") as new:
        new.writestr("c/data.pkl", bytes(DEFAULT_LIMITS.pickle_bytes + 1))
    source = CountedSource(LocalFile(path))
    with pytest.raises(CheckpointError, match=r"data\.pkl of .* is 33554433 bytes long"):
        read_torch_file(source)
    assert source.bytes_read < 1_000_000


def test_bytes_added_in_front_or_behind_are_noticed(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    changed = tmp_path / "changed.pt"
    for content in (data[:4] + b"1234" + data[4:], data + b"more", data[:4] + data[500:]):
        changed.write_bytes(content)
        with LocalFile(changed) as source, pytest.raises(CheckpointError):
            read_torch_file(source)


def test_a_damaged_pickle_is_caught_by_its_checksum(path: Path) -> None:
    data = bytearray(path.read_bytes())
    position = data.index(b"FloatStorage")
    data[position] ^= 1
    path.write_bytes(data)
    with LocalFile(path) as source, pytest.raises(CheckpointError, match="its CRC32 does not match"):
        read_torch_file(source)


def test_a_local_header_that_contradicts_the_directory_is_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as oracle:
        offset = oracle.getinfo("c/data/0").header_offset
    data[offset + 30] ^= 1
    path.write_bytes(data)
    with LocalFile(path) as source, pytest.raises(CheckpointError, match="contradicts its directory"):
        bytes_in(read_torch_file(source), "a")


def test_a_flipped_byte_anywhere_in_the_directory_never_gives_wrong_tensors(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    right = (bytes_of(torch.arange(100.0)), bytes_of(torch.arange(7)))
    changed = tmp_path / "changed.pt"
    refused = 0
    for position in range(data.index(b"PK\x01\x02"), len(data)):
        changed.write_bytes(data[:position] + bytes([data[position] ^ 0x41]) + data[position + 1 :])
        try:
            with LocalFile(changed) as source:
                file = read_torch_file(source)
                assert (bytes_in(file, "a"), bytes_in(file, "b")) == right
        except (CheckpointError, KeyError):
            refused += 1
    assert refused > 100
