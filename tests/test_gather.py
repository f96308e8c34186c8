"""Tensors out of storages, against an independent loop over indices."""

import itertools
import struct
from pathlib import Path

import pytest
import torch

from dflash_model.checkpoint.gather import StorageReader, strided_blocks
from dflash_model.checkpoint.source import BLOCK_BYTES, CountedSource, LocalFile
from dflash_model.checkpoint.torch_container import open_container
from dflash_model.checkpoint.torch_tensor import Geometry
from tests.checkpoint_files import bytes_of, save


def geometry(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, dtype: str = "I16") -> Geometry:
    return Geometry(dtype=dtype, shape=shape, stride=stride, storage_offset=offset, storage_key="0", storage_bytes=2000)


def by_loop(storage: list[int], one: Geometry) -> bytes:
    places = (
        one.storage_offset + sum(i * step for i, step in zip(index, one.stride, strict=True))
        for index in itertools.product(*map(range, one.shape))
    )
    return b"".join(struct.pack("<h", storage[place]) for place in places)


@pytest.mark.parametrize(
    "one",
    [
        geometry((3, 4), (1, 3)),
        geometry((2, 3, 4), (1, 8, 2), 5),
        geometry((3, 2), (0, 1), 7),
        geometry((5,), (10,), 3),
        geometry((2, 1, 3), (1, 1 << 61, 2)),
        geometry((1, 2, 2), (1 << 61, 1, 2)),
    ],
    ids=str,
)
def test_strided_tensors_equal_a_loop_over_their_indices(one: Geometry) -> None:
    storage = list(range(100, 300))
    raw = struct.pack("<200h", *storage)
    first, size = one.span
    assert not one.contiguous
    assert b"".join(strided_blocks(raw[first : first + size], one)) == by_loop(storage, one)
    assert raw[first : first + len(by_loop(storage, one))] != by_loop(storage, one)


@pytest.mark.parametrize(
    ("one", "contiguous", "span"),
    [
        (geometry((2, 3), (3, 1)), True, (0, 12)),
        (geometry((2, 3), (3, 1), 4), True, (8, 12)),
        (geometry((1, 3), (99, 1)), True, (0, 6)),
        (geometry((), ()), True, (0, 2)),
        (geometry((), (), 9), True, (18, 2)),
        (geometry((0, 3), (5, 7), 3), True, (0, 0)),
        (geometry((3, 2), (1, 3)), False, (0, 12)),
        (geometry((2, 2), (4, 1)), False, (0, 12)),
        (geometry((3, 2), (0, 1)), False, (0, 4)),
    ],
)
def test_geometry_knows_its_span_and_order(one: Geometry, contiguous: bool, span: tuple[int, int]) -> None:
    assert (one.contiguous, one.span) == (contiguous, span)


def test_large_strided_tensors_come_in_blocks_of_whole_rows(tmp_path: Path) -> None:
    value = torch.arange(3000 * 1000, dtype=torch.float32).reshape(1000, 3000).t()
    container = open_container(LocalFile(save(value, tmp_path / "c.pt")))
    one = geometry((3000, 1000), (1, 3000), dtype="F32")
    storage = container.storage("0")
    assert storage is not None
    blocks = list(StorageReader(container).blocks(one, storage, name="w"))
    assert b"".join(blocks) == bytes_of(value)
    assert len(blocks) == 3
    assert all(len(block) <= BLOCK_BYTES and len(block) % 4000 == 0 for block in blocks)


def test_a_whole_tensor_is_read_once_and_a_view_costs_its_storage_once_more(tmp_path: Path) -> None:
    value = torch.arange(1000.0)
    source = CountedSource(LocalFile(save([value, value[:10]], tmp_path / "c.pt")))
    container = open_container(source)
    storage = container.storage("0")
    assert storage is not None
    reader = StorageReader(container)
    container.locate(["0"])
    costs = []
    for one in (geometry((1000,), (1,), dtype="F32"), geometry((10,), (1,), dtype="F32"), geometry((10,), (1,), dtype="F32")):
        before = source.bytes_read
        list(reader.blocks(one, storage, name="w"))
        costs.append(source.bytes_read - before)
    assert costs == [4000, 40, 40]  # the first proved the storage intact
    fresh = StorageReader(container)
    before = source.bytes_read
    list(fresh.blocks(geometry((10,), (1,), dtype="F32"), storage, name="w"))
    assert source.bytes_read - before == 4040
