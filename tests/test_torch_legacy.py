"""The non-zip form: laid out from its pickles, checked against its counts and the file's size."""

import io
import pickle
from pathlib import Path

import pytest
import torch

from dflash_model.checkpoint.source import CountedSource, LocalFile
from dflash_model.checkpoint.torch_file import read_torch_file
from dflash_model.checkpoint.torch_legacy import read_legacy
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import LEGACY, bytes_in, bytes_of, drafter_tensors, save


def test_storages_are_laid_out_without_reading_them(tmp_path: Path) -> None:
    path = save({"model": drafter_tensors(hidden=256), "step": 1}, tmp_path / "c.pt", **LEGACY)
    source = CountedSource(LocalFile(path))
    storages = read_legacy(source).storages
    assert source.bytes_read < source.size_bytes / 2
    end = max(storage.count_offset + 8 + storage.size_bytes for storage in storages.values())
    assert end == source.size_bytes
    assert len(storages) == 14


@pytest.mark.parametrize("filler", [0, 255_900, 256 * 1024, 600_000])
def test_pickles_longer_than_the_read_ahead_are_read(tmp_path: Path, filler: int) -> None:
    saved = {"text": "x" * filler, "w": torch.arange(5), **{f"k{i}": "line\n" * (i % 3) for i in range(2000)}}
    file = read_torch_file(LocalFile(save(saved, tmp_path / "c.pt", **LEGACY)))
    assert bytes_in(file, "w") == bytes_of(torch.arange(5))
    assert file.plain()["k1999"] == "line\n"


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    data = save({"a": torch.arange(10.0)}, tmp_path / "c.pt", **LEGACY).read_bytes()
    cut = tmp_path / "cut.pt"
    for size in range(1, len(data), 7):
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            read_torch_file(LocalFile(cut))
    cut.write_bytes(data)
    read_torch_file(LocalFile(cut))


def test_a_count_that_contradicts_the_pickle_is_refused(tmp_path: Path) -> None:
    path = save({"a": torch.arange(10.0)}, tmp_path / "c.pt", **LEGACY)
    data = bytearray(path.read_bytes())
    data[-48] = 11
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="of 11 elements, not the 40 bytes"):
        bytes_in(read_torch_file(LocalFile(path)), "a")


def headed(*objects: object) -> bytes:
    stream = io.BytesIO()
    for one in objects:
        pickle.dump(one, stream, protocol=2)
    return stream.getvalue()


MAGIC = 0x1950A86A20F9469CFC6C


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (headed({"weights": [1]}), "not one of torch.save"),
        (headed(MAGIC, 1002, {}, {}, []), "unknown legacy version"),
        (headed(MAGIC, 1001, {"little_endian": False}, {}, []), "big-endian"),
        (headed(MAGIC, 1001, {"little_endian": True}, {}, ["5"]), "that nothing uses"),
        (headed(MAGIC, 1001, {"little_endian": True}, {}, [5]), "storage list"),
        (headed(MAGIC, 1001), "system facts"),
    ],
)
def test_other_heads_are_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "c.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        read_torch_file(LocalFile(path))


def test_a_count_in_bytes_is_what_older_torch_wrote_for_storages_saved_beside_their_tensors(tmp_path: Path) -> None:
    path = save({"a": torch.arange(10.0)}, tmp_path / "c.pt", **LEGACY)
    data = bytearray(path.read_bytes())
    assert data[-48] == 10
    data[-48] = 40
    path.write_bytes(data)
    assert bytes_in(read_torch_file(LocalFile(path)), "a") == bytes_of(torch.arange(10.0))


def test_storages_of_refused_types_keep_their_place(tmp_path: Path) -> None:
    saved = {"first": torch.ones(3, dtype=torch.complex128), "then": torch.arange(4.0)}
    file = read_torch_file(LocalFile(save(saved, tmp_path / "c.pt", **LEGACY)))
    assert bytes_in(file, "then") == bytes_of(torch.arange(4.0))
    assert list(file.refused()) == [("first",)]
