"""torch.distributed.checkpoint directories: shards put together as torch's own loader does."""

import argparse
import io
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dflash_model.checkpoint.dcp import DcpCheckpoint, read_dcp
from dflash_model.checkpoint.directory import LocalDirectory
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import DTYPES, bytes_in, bytes_of

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes)."""


def opened(path: Path) -> DcpCheckpoint:
    return read_dcp(LocalDirectory(path))


@pytest.mark.filterwarnings("ignore::UserWarning")
def saved_by_torch(path: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def sharded(path: Path, tensors: dict[str, torch.Tensor], chunks: dict[str, list[Chunk]], **change: Any) -> Path:
    """A checkpoint of several ranks, written by hand with torch's own metadata classes: chunk i lies in rank i's file."""
    path.mkdir()
    files: dict[str, bytearray] = {}
    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        places = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks[name]]
        described[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), places)
        for rank, (offsets, sizes) in enumerate(chunks[name]):
            stream = io.BytesIO()
            part = tensor[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
            torch.save(part.clone(), stream)
            file = files.setdefault(f"__{rank}_0.distcp", bytearray(b"before"))
            info = _StorageInfo(f"__{rank}_0.distcp", len(file), stream.tell(), **change)
            stored[MetadataIndex(name, torch.Size(offsets), rank)] = info
            file += stream.getvalue()
    for file_name, content in files.items():
        (path / file_name).write_bytes(content)
    planner = {name: tuple(name.split("/")) for name in tensors}
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(described, planner_data=planner, storage_data=stored)))
    return path


def loaded_by_torch(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    target = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    return target


def slabs(rows: int, columns: int, *splits: int) -> list[Chunk]:
    edges = [0, *splits, rows]
    return [((a, 0), (b - a, columns)) for a, b in itertools.pairwise(edges)]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_dtype_is_byte_equal_to_torch_load(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {str(dtype): (torch.randn(3, 5) * 50).to(dtype) for dtype in DTYPES}
    tensors |= {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 2),
        "transposed": torch.randn(3, 4).t(),
        "view": torch.randn(9)[2:5],
    }
    path = saved_by_torch(tmp_path / "c", {"model": tensors, "step": 5})
    found = opened(path)
    loaded = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    dcp.load(loaded, checkpoint_id=path, no_dist=True)
    assert {name[1] for name in found.by_path()} == set(tensors)
    for name, tensor in loaded["model"].items():
        assert bytes_in(found, "model", name) == bytes_of(tensor) == bytes_of(tensors[name]), name
        assert found.by_path()["model", name].shape == tuple(tensor.shape)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "chunks",
    [
        slabs(10, 6, 3, 7),
        list(reversed(slabs(10, 6, 3, 7))),
        [((0, 0), (10, 2)), ((0, 2), (10, 4))],
        [((0, 0), (4, 3)), ((0, 3), (4, 3)), ((4, 0), (6, 3)), ((4, 3), (6, 3))],
        [((0, 0), (10, 6)), ((10, 0), (0, 6))],
    ],
    ids=["rows", "rows out of order", "columns", "grid", "an empty rank"],
)
def test_shards_are_put_together_as_torch_does(tmp_path: Path, chunks: list[Chunk]) -> None:
    tensors = {"w": torch.arange(60, dtype=torch.bfloat16).reshape(10, 6)}
    path = sharded(tmp_path / "c", tensors, {"w": chunks})
    assert torch.equal(loaded_by_torch(path, tensors)["w"], tensors["w"])
    found = opened(path)
    assert bytes_in(found, "w") == bytes_of(tensors["w"])
    in_file_order = b"".join(
        bytes_of(tensors["w"][tuple(slice(a, a + n) for a, n in zip(*chunk, strict=True))]) for chunk in chunks
    )
    if chunks not in (slabs(10, 6, 3, 7), [((0, 0), (10, 6)), ((10, 0), (0, 6))]):
        assert in_file_order != bytes_of(tensors["w"])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_objects_beside_the_tensors_come_out_nested(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2)}, "step": 5, "args": argparse.Namespace(lr=0.1),
        "optim": {"param_groups": [{"lr": 0.5}], "state": {"w": {"exp_avg": torch.ones(2)}}},
    }  # fmt: skip
    plain = opened(saved_by_torch(tmp_path / "c", state)).plain()
    assert (plain["step"], plain["args"]) == (5, {"lr": 0.1})


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([((0, 0), (3, 6)), ((4, 0), (6, 6))], "do not add up"),
        ([((0, 0), (6, 6)), ((4, 0), (4, 6))], "overlap"),
    ],
)
def test_gaps_and_overlaps_are_refused(tmp_path: Path, chunks: list[Chunk], reason: str) -> None:
    tensors = {"w": torch.arange(60.0).reshape(10, 6)}
    assert (sum(math.prod(sizes) for _, sizes in chunks) == 60) == (reason == "overlap")
    with pytest.raises(CheckpointError, match=reason):
        bytes_in(opened(sharded(tmp_path / "c", tensors, {"w": chunks})), "w")


def test_a_missing_rank_file_is_an_error(tmp_path: Path) -> None:
    path = sharded(tmp_path / "c", {"w": torch.ones(10, 6)}, {"w": slabs(10, 6, 5)})
    (path / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*__1_0"):
        bytes_in(opened(path), "w")


def test_a_truncated_rank_file_is_an_error(tmp_path: Path) -> None:
    path = sharded(tmp_path / "c", {"w": torch.ones(10, 6)}, {"w": slabs(10, 6, 5)})
    data = (path / "__1_0.distcp").read_bytes()
    (path / "__1_0.distcp").write_bytes(data[:-10])
    found = opened(path)
    for act in (found.check_extents, lambda: bytes_in(found, "w")):
        with pytest.raises(CheckpointError, match="ends early"):
            act()


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = sharded(tmp_path / "c", {"w": torch.full((10, 6), 7.0)}, {"w": slabs(10, 6, 5)})
    data = bytearray((path / "__1_0.distcp").read_bytes())
    data[data.index(bytes_of(torch.full((5, 6), 7.0)))] ^= 1
    (path / "__1_0.distcp").write_bytes(data)
    with pytest.raises(CheckpointError, match="CRC32"):
        bytes_in(opened(path), "w")


def test_transformed_items_and_unreadable_dtypes_are_refused_only_when_wanted(tmp_path: Path) -> None:
    path = sharded(tmp_path / "c", {"w": torch.ones(4, 2)}, {"w": slabs(4, 2)}, transform_descriptors=["zstd"])
    assert "transform_descriptors" in opened(path).refused()["w",].reason
    path = sharded(tmp_path / "d", {"w": torch.ones(4, 2, dtype=torch.complex128)}, {"w": slabs(4, 2)})
    assert "complex128" in opened(path).refused()["w",].reason


def test_metadata_that_lies_is_refused(tmp_path: Path) -> None:
    path = sharded(tmp_path / "c", {"w": torch.ones(4, 2)}, {"w": slabs(4, 2)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    (index,) = metadata.storage_data
    length = metadata.storage_data[index].length
    for info, reason in (
        (_StorageInfo("../other/__0_0.distcp", 6, length), "not a plain file name"),
        (_StorageInfo("__0_0.distcp", 6, length - 100), "no zip end record"),
        (_StorageInfo("__0_0.distcp", 6, length + 1), "ends early"),
        (_StorageInfo("__0_0.distcp", 0, length), "no torch.save file"),
        (_StorageInfo("__0_0.distcp", -6, length), "in a way that torch never writes"),
    ):
        metadata.storage_data = {index: info}
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointError, match=reason):
            bytes_in(opened(path), "w")
    metadata.storage_data = {}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "lacks its chunk at [0, 0]" in opened(path).refused()["w",].reason


def test_a_chunk_of_another_shape_than_claimed_is_refused(tmp_path: Path) -> None:
    path = sharded(tmp_path / "c", {"w": torch.ones(4, 2)}, {"w": slabs(4, 2)})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size((2, 4))
    metadata.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 4)))]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"holds F32 \[4, 2\] where .metadata claims F32 \[2, 4\]"):
        bytes_in(opened(path), "w")


def test_other_pickles_are_no_metadata(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(CheckpointError, match=r"no metadata of torch\.distributed\.checkpoint"):
        opened(tmp_path)
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        opened(tmp_path / "absent")


def test_the_digest_follows_content_not_the_save(tmp_path: Path) -> None:
    first = sharded(tmp_path / "a", {"w": torch.ones(4, 2)}, {"w": slabs(4, 2, 2)})
    again = sharded(tmp_path / "b", {"w": torch.ones(4, 2)}, {"w": slabs(4, 2, 2)})
    other = sharded(tmp_path / "c", {"w": torch.full((4, 2), 2.0)}, {"w": slabs(4, 2, 2)})
    digests = [opened(path).content_digest() for path in (first, again, other)]
    assert digests[0] == digests[1] != digests[2]


def test_bytes_metadata_without_an_item_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"x": BytesStorageMetadata()}, storage_data={})))
    assert (opened(tmp_path).tensors(), opened(tmp_path).plain()) == ({}, {})
