"""What a model directory may look like, and how a broken one is named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_model.errors import CheckpointError, ConfigError, InputError
from dflash_model.target.model_directory import read_config, read_shard, shard_paths, text_config


def _shard(path: Path, *names: str) -> None:
    save_file({name: np.arange(6, dtype=np.float32).reshape(2, 3) for name in names}, path, {"format": "pt"})


def _sharded(directory: Path) -> None:
    _shard(directory / "a.safetensors", "x")
    _shard(directory / "b.safetensors", "y")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_single_file_and_an_indexed_set_are_both_found(tmp_path: Path) -> None:
    single, several = tmp_path / "single", tmp_path / "several"
    single.mkdir()
    several.mkdir()
    _shard(single / "model.safetensors", "x")
    _sharded(several)
    _shard(several / "extra.safetensors", "z")
    assert [path.name for path in shard_paths(single)] == ["model.safetensors"]
    assert [path.name for path in shard_paths(several)] == ["a.safetensors", "b.safetensors"]


def test_a_header_gives_dtype_shape_and_the_very_bytes(tmp_path: Path) -> None:
    _shard(tmp_path / "m.safetensors", "x", "y")
    shard = read_shard(tmp_path / "m.safetensors")
    entry = shard.tensors["y"]
    raw = shard.path.read_bytes()[entry.start : entry.end]
    assert (entry.dtype, entry.shape) == ("F32", (2, 3))
    assert np.frombuffer(raw, dtype=np.float32).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_config_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_config(tmp_path) == {}
    with pytest.raises(InputError, match="holds no weights"):
        shard_paths(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"lacks 1 of the 2 shards .*: b\.safetensors"):
        shard_paths(tmp_path)


def test_an_index_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../a.safetensors"}}')
    with pytest.raises(CheckpointError, match="outside"):
        shard_paths(tmp_path)


@pytest.mark.parametrize("keep", [4, 40, -5])
def test_a_truncated_shard_is_refused(tmp_path: Path, keep: int) -> None:
    _shard(tmp_path / "m.safetensors", "x")
    content = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(content[:keep])
    with pytest.raises(CheckpointError):
        read_shard(tmp_path / "m.safetensors")


def test_a_shard_with_bytes_after_its_tensors_is_refused(tmp_path: Path) -> None:
    _shard(tmp_path / "m.safetensors", "x")
    with (tmp_path / "m.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="truncated or still growing"):
        read_shard(tmp_path / "m.safetensors")


def test_directories_and_configs_that_are_not_there_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a directory"):
        read_config(tmp_path / "absent")
    with pytest.raises(InputError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not an object"):
        read_config(tmp_path)


def test_the_text_part_of_a_wrapper_config_is_found() -> None:
    assert text_config({"model_type": "a"}) == {"model_type": "a"}
    assert text_config({"model_type": "a", "text_config": {"model_type": "b"}}) == {"model_type": "b"}
    with pytest.raises(ConfigError):
        text_config({"text_config": 3})
