"""Whether a checkpoint looks complete: while it grows, when it is cut, and when it is not one at all."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from dflash_model.checkpoint.complete import describe_completeness, describe_directory_completeness
from dflash_model.checkpoint.directory import LocalDirectory
from dflash_model.checkpoint.source import CountedSource, LocalFile
from tests.checkpoint_files import LEGACY, drafter_tensors, save

WRITERS: dict[str, Callable[[Path], object]] = {
    "zip": lambda path: save({"model": drafter_tensors(), "step": 1}, path),
    "legacy": lambda path: save({"model": drafter_tensors(), "step": 1}, path, **LEGACY),
    "safetensors": lambda path: save_file(drafter_tensors(), path),
}


def described(path: Path) -> str | None:
    with LocalFile(path) as source:
        return describe_completeness(source)


@pytest.mark.parametrize("form", WRITERS)
def test_only_the_whole_file_is_complete(tmp_path: Path, form: str) -> None:
    WRITERS[form](tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    assert described(tmp_path / "whole") is None
    growing = tmp_path / "growing"
    for size in (0, 1, 8, 9, 100, len(data) // 3, len(data) * 2 // 3, len(data) - 64, len(data) - 1):
        growing.write_bytes(data[:size])
        sentence = described(growing)
        assert sentence is not None, size
        assert sentence.endswith("."), sentence
    growing.write_bytes(data)
    assert described(growing) is None


def test_a_growing_zip_is_said_to_have_no_end(tmp_path: Path) -> None:
    WRITERS["zip"](tmp_path / "f")
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-300])
    assert described(tmp_path / "f") == f"{tmp_path / 'f'} has no zip end record."


@pytest.mark.parametrize("content", [b"hello, this is text", bytes(1000), b"\x80\x04]."])
def test_garbage_is_not_complete(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    assert described(tmp_path / "f") is not None


def test_looking_is_cheap(tmp_path: Path) -> None:
    for form, write in WRITERS.items():
        path = tmp_path / form
        write(path)
        save({"w": torch.zeros(2_000_000)}, path, **(LEGACY if form == "legacy" else {})) if form != "safetensors" else save_file(
            {"w": torch.zeros(2_000_000)}, path
        )
        with LocalFile(path) as source:
            counted = CountedSource(source)
            assert describe_completeness(counted) is None
            assert counted.bytes_read < 600_000, form


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_directories_need_every_shard_in_full(tmp_path: Path) -> None:
    sharded, distributed = tmp_path / "sharded", tmp_path / "dcp"
    sharded.mkdir()
    save_file({"a": torch.ones(3)}, sharded / "m-1.safetensors")
    save_file({"b": torch.ones(3)}, sharded / "m-2.safetensors")
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    dcp.save({"model": drafter_tensors()}, checkpoint_id=distributed, no_dist=True)
    for path, victim in ((sharded, "m-2.safetensors"), (distributed, "__0_0.distcp")):
        with LocalDirectory(path) as directory:
            assert describe_directory_completeness(directory) is None
        data = (path / victim).read_bytes()
        (path / victim).write_bytes(data[:-1])
        with LocalDirectory(path) as directory:
            assert victim in (describe_directory_completeness(directory) or "")
        (path / victim).unlink()
        with LocalDirectory(path) as directory:
            assert victim in (describe_directory_completeness(directory) or "")
