"""Our own tensor files appear whole, keep their dtypes, and fail with one kind of error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_model.errors import InputError, StorageError
from dflash_model.target.tensor_file import read_tensors, write_tensors


def test_tensors_and_metadata_survive_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.safetensors"
    tensors = {"a": torch.arange(6).reshape(2, 3).T, "b": torch.tensor([1.5], dtype=torch.bfloat16)}
    write_tensors(path, tensors, metadata={"k": "v"})
    read, metadata = read_tensors(path, kind="test")
    assert torch.equal(read["a"], tensors["a"])
    assert read["b"].dtype == torch.bfloat16
    assert metadata == {"k": "v"}
    assert [p.name for p in path.parent.iterdir()] == ["t.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_write_that_cannot_be_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.mkdir()
    with pytest.raises((InputError, StorageError)):
        write_tensors(path, {"a": torch.ones(1)}, metadata={})
    assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]


def test_missing_and_damaged_files_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(InputError, match="There is no test file"):
        read_tensors(path, kind="test")
    write_tensors(path, {"a": torch.ones(100)}, metadata={})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(StorageError, match="not a readable test file"):
        read_tensors(path, kind="test")


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    metadata = {f"key-{number}": str(number) for number in range(20)}
    contents = set()
    for number in range(5):
        write_tensors(tmp_path / str(number), {"a": torch.ones(3, 2), "b": torch.zeros(4, dtype=torch.int64)}, metadata=metadata)
        contents.add((tmp_path / str(number)).read_bytes())
    assert len(contents) == 1
