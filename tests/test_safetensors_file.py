"""safetensors by their headers: what the format's own library writes is read, what lies is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.checkpoint.safetensors_file import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    SafetensorsSet,
    open_safetensors_dir,
    read_safetensors_header,
)
from dflash_model.checkpoint.source import CountedSource, LocalFile
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import DTYPES, bytes_in, bytes_of


def written(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> LocalFile:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return LocalFile(path)


def tensor(begin: int, end: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_every_dtype_and_shape_is_read_byte_for_byte(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = {str(dtype): (torch.randn(3, 5) * 50).to(dtype) for dtype in DTYPES}
    saved |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "große": torch.ones(2)}
    save_file(saved, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
    found = open_safetensors_dir(tmp_path)
    assert set(found.tensors()) == set(saved)
    assert found.plain() == {"format": "pt"}
    for name, value in saved.items():
        entry = found.tensors()[name]
        assert (entry.shape, entry.shard) == (tuple(value.shape), SINGLE_NAME)
        assert bytes_in(found, name) == bytes_of(value), name
        raw = (tmp_path / SINGLE_NAME).read_bytes()[entry.offset : entry.offset + entry.size_bytes]
        assert raw == bytes_of(value)


def test_a_header_is_read_without_the_data(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1_000_000)}, tmp_path / "f")
    source = CountedSource(LocalFile(tmp_path / "f"))
    read_safetensors_header(source, shard="f")
    assert source.bytes_read < 1000


@pytest.mark.parametrize(
    ("header", "data", "reason"),
    [
        ({"a": tensor(0, 4), "b": tensor(2, 6)}, 6, "overlaps"),
        ({"a": tensor(0, 4), "b": tensor(5, 6)}, 6, "leaves a hole"),
        ({"a": tensor(1, 4)}, 4, "leaves a hole"),
        ({"a": tensor(0, 4)}, 5, "bytes behind its last tensor"),
        ({"a": tensor(0, 4)}, 3, "truncated or still being written"),
        ({"a": tensor(0, 4, shape=[3])}, 4, "do not fit"),
        ({"a": tensor(0, 4, dtype="F32", shape=[4])}, 4, "do not fit"),
        ({"a": tensor(0, 4, dtype="F4", shape=[8])}, 4, "dtype 'F4'"),
        ({"a": tensor(0, 4, shape=[-4])}, 4, "does not have"),
        ({"a": tensor(0, 4, shape=[2, True])}, 4, "does not have"),
        ({"a": tensor(0, 0, shape=[0] * 65)}, 0, "do not fit"),
        ({"a": {"dtype": "U8", "shape": [1]}}, 1, "does not have"),
        ({"a": 5}, 0, "does not have"),
        ({"__metadata__": {"k": 1}}, 0, "not text"),
        ([1], 0, "no JSON object"),
        (b"{nonsense", 0, "not JSON"),
        (b'{"a": {}, "a": {}}', 0, "a name stands twice"),
        (b"[" * 100_000, 0, "not JSON"),
        (b"\xff\xfe", 0, "not JSON"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, header: Any, data: int, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_safetensors_header(written(tmp_path / "f", header, bytes(data)), shard="f")


def test_lengths_that_lie_are_refused(tmp_path: Path) -> None:
    good = {"a": tensor(0, 4)}
    read_safetensors_header(written(tmp_path / "f", good, bytes(4)), shard="f")
    for length, reason in ((MAX_HEADER_BYTES + 1, "claims a safetensors header"), (1000, "ends inside")):
        with pytest.raises(CheckpointError, match=reason):
            read_safetensors_header(written(tmp_path / "f", good, bytes(4), length=length), shard="f")
    (tmp_path / "f").write_bytes(b"1234567")
    with pytest.raises(CheckpointError, match="too short"):
        read_safetensors_header(LocalFile(tmp_path / "f"), shard="f")


def shards(path: Path, parts: dict[str, dict[str, torch.Tensor]], weight_map: dict[str, str] | None = None) -> Path:
    for shard, tensors in parts.items():
        save_file(tensors, path / shard)
    weight_map = {name: shard for shard, tensors in parts.items() for name in tensors} if weight_map is None else weight_map
    (path / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


PARTS = {"model-1.safetensors": {"a": torch.arange(3.0)}, "model-2.safetensors": {"b": torch.ones(2), "c": torch.zeros(1)}}


def test_a_sharded_directory_is_one_table(tmp_path: Path) -> None:
    found = open_safetensors_dir(shards(tmp_path, PARTS))
    assert {name: entry.shard[6] for name, entry in found.tensors().items()} == {"a": "1", "b": "2", "c": "2"}
    assert bytes_in(found, "a") == bytes_of(torch.arange(3.0))
    assert found.size_bytes == sum((tmp_path / shard).stat().st_size for shard in PARTS)


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}, "lacks the shard model-3"),
        ({"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}, "'b' in model-1.*lies in model-2"),
        ({"a": "model-1.safetensors", "d": "model-2.safetensors"}, "'d' in model-2.*no shard has it"),
        ({"a": "model-1.safetensors", "b": "model-2.safetensors"}, "'c' in model-2.*does not list"),
        ({"a": "../model-1.safetensors"}, "not a plain file name"),
        ({"a": 1}, "not a plain file name"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path, weight_map: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        open_safetensors_dir(shards(tmp_path, PARTS, weight_map))


def test_a_tensor_in_two_shards_names_both(tmp_path: Path) -> None:
    parts = {"model-1.safetensors": {"a": torch.ones(1), "b": torch.ones(1)}, "model-3.safetensors": {"a": torch.ones(1)}}
    with pytest.raises(CheckpointError, match=r"'a' in two shards, model-1\.safetensors and model-3\.safetensors"):
        open_safetensors_dir(shards(tmp_path, parts))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    path = shards(tmp_path, PARTS)
    data = (path / "model-2.safetensors").read_bytes()
    (path / "model-2.safetensors").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors is truncated"):
        open_safetensors_dir(path)


def test_the_index_wins_over_a_stray_single_file(tmp_path: Path) -> None:
    save_file({"stray": torch.ones(1)}, tmp_path / SINGLE_NAME)
    assert set(open_safetensors_dir(shards(tmp_path, PARTS)).tensors()) == {"a", "b", "c"}


def test_a_directory_without_either_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"neither {SINGLE_NAME} nor {INDEX_NAME}"):
        open_safetensors_dir(tmp_path)
    with pytest.raises(CheckpointError, match="There is no checkpoint directory"):
        open_safetensors_dir(tmp_path / "absent")


def test_the_digest_follows_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "f"
    save_file({"a": torch.arange(9.0)}, path)
    before = SafetensorsSet("f", {"f": LocalFile(path)}).content_digest()
    assert SafetensorsSet("f", {"f": LocalFile(path)}).content_digest() == before
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert SafetensorsSet("f", {"f": LocalFile(path)}).content_digest() != before
