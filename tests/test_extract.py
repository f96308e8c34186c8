"""Extraction: one normal form from every format, only what is wanted, nothing left on error."""

import argparse
import hashlib
import json
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_model.checkpoint.extract import METADATA, extract_weights, extract_weights_from_dir, plan_extraction
from dflash_model.checkpoint.open_table import open_table
from dflash_model.checkpoint.source import BLOCK_BYTES, LocalFile
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import LEGACY, drafter_tensors, many_tensors, ordered, save


def training_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a trainer saves: wrapped names, tables, an optimizer twice as large, arguments."""
    tables = {"embed_tokens.weight": torch.ones(50, 8), "rotary_emb.inv_freq": torch.ones(4)}
    moments = {
        i: {"step": torch.tensor(3.0), "exp_avg": torch.ones_like(t), "exp_avg_sq": torch.ones_like(t)}
        for i, t in enumerate(tensors.values())
    }
    return {
        "model_state_dict": ordered(tensors | tables, "module._orig_mod."),
        "optimizer_state_dict": {"state": moments, "param_groups": [{"lr": 1e-3, "params": list(moments)}]},
        "step": 110, "args": argparse.Namespace(mask_token_id=3, target_layer_ids=[1, 4, 6]),
    }  # fmt: skip


def extracted(path: Path, out: Path, **options: Any) -> Any:
    with LocalFile(path) as source:
        return extract_weights(source, out, **options)


def assert_equal(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_a_training_state_becomes_the_drafters_file(tmp_path: Path, options: dict[str, Any]) -> None:
    tensors = drafter_tensors(layers=2, hidden=64)
    path = save(training_state(tensors), tmp_path / "c.pt", **options)
    out = tmp_path / "out" / "model.safetensors"
    report = extracted(path, out)
    assert_equal(out, tensors)
    with safe_open(out, "pt") as file:
        assert file.metadata() == METADATA
    assert (report.tensors, report.key_path, report.dtypes) == (25, "model_state_dict", {"F32": 25})
    assert set(report.prefixes) == {"module.", "_orig_mod."}
    assert set(report.dropped) == {"module._orig_mod.embed_tokens.weight", "module._orig_mod.rotary_emb.inv_freq"}
    assert report.facts["step"] == 110
    assert report.facts["args"] == {"mask_token_id": 3, "target_layer_ids": [1, 4, 6]}
    json.dumps(report.facts)
    assert report.bytes_written == out.stat().st_size
    assert report.sha256 == hashlib.sha256(out.read_bytes()).hexdigest()


def test_the_optimizer_is_not_read(tmp_path: Path) -> None:
    path = save(training_state(drafter_tensors(layers=2, hidden=256)), tmp_path / "c.pt")
    report = extracted(path, tmp_path / "m")
    size = path.stat().st_size
    assert report.bytes_read < 0.4 * size
    assert report.bytes_skipped == size - report.bytes_read
    assert report.bytes_written > 0.3 * size


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_format_gives_the_same_file(tmp_path: Path) -> None:
    tensors = drafter_tensors(layers=2) | {"odd.int": torch.arange(3), "odd.bf16": torch.ones(3).bfloat16()}
    save(training_state(tensors), tmp_path / "zip.pt")
    save(training_state(tensors), tmp_path / "legacy.pt", **LEGACY)
    save(tensors, tmp_path / "bare.pt")
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    single.mkdir()
    sharded.mkdir()
    save_file(tensors, single / "model.safetensors")
    first = dict(list(tensors.items())[:9])
    rest = {name: tensor for name, tensor in tensors.items() if name not in first}
    save_file(first, sharded / "m-1.safetensors")
    save_file(rest, sharded / "m-2.safetensors")
    weight_map = dict.fromkeys(first, "m-1.safetensors") | dict.fromkeys(rest, "m-2.safetensors")
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    dcp.save({"model": ordered(tensors, "model."), "step": 4}, checkpoint_id=tmp_path / "dcp", no_dist=True)

    digests = {name: extracted(tmp_path / name, tmp_path / "out").sha256 for name in ("zip.pt", "legacy.pt", "bare.pt")}
    digests["file"] = extracted(single / "model.safetensors", tmp_path / "out").sha256
    for name in ("single", "sharded", "dcp"):
        digests[name] = extract_weights_from_dir(tmp_path / name, tmp_path / "out").sha256
    assert_equal(tmp_path / "out", tensors)
    assert len(set(digests.values())) == 1, digests
    assert len(digests) == 7


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_dcp_report_tells_step_and_source(tmp_path: Path) -> None:
    dcp.save({"model": drafter_tensors(), "step": 4}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    report = extract_weights_from_dir(tmp_path / "dcp", tmp_path / "out")
    assert (report.format, report.facts, report.key_path) == ("dcp", {"step": 4}, "model")


def test_bf16_equals_torchs(tmp_path: Path) -> None:
    tensors = many_tensors()
    path = save({"model": tensors | drafter_tensors()}, tmp_path / "c.pt")
    report = extracted(path, tmp_path / "m", cast="bf16")
    loaded = load_file(tmp_path / "m")
    cast = {torch.float32, torch.float16, torch.float64}
    assert {tensor.dtype for tensor in tensors.values()} > cast
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.bfloat16() if tensor.dtype in cast else tensor), name
        assert loaded[name].shape == tensor.shape
    assert "F32" not in report.dtypes
    assert report.dtypes["F8_E4M3"] == 1


def test_an_unknown_cast_is_the_callers_mistake(tmp_path: Path) -> None:
    path = save(drafter_tensors(), tmp_path / "c.pt")
    with pytest.raises(ValueError, match="cast 'fp8'"):
        extracted(path, tmp_path / "m", cast="fp8")


def test_key_and_vocabulary_are_passed_on(tmp_path: Path) -> None:
    tensors = drafter_tensors() | {"lm_head.weight": torch.ones(5, 8)}
    path = save({"model": drafter_tensors(), "ema": tensors}, tmp_path / "c.pt")
    extracted(path, tmp_path / "m", key="ema", keep_vocab=True)
    assert_equal(tmp_path / "m", tensors)


def flip(path: Path, entry_name: str, byte: int) -> None:
    with LocalFile(path) as source:
        table: Any = open_table(source)
        offset, _ = table.storage_range(table.tensors()[entry_name])
    data = bytearray(path.read_bytes())
    data[offset + byte] ^= 1
    path.write_bytes(data)


def test_a_damaged_tensor_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    path = save({"model": drafter_tensors(), "optimizer": {"m": torch.ones(9)}}, tmp_path / "c.pt")
    flip(path, "optimizer.m", 5)
    extracted(path, tmp_path / "m")  # damage elsewhere does not matter
    (tmp_path / "m").unlink()
    flip(path, "model.fc.weight", 5)
    with pytest.raises(CheckpointError, match=r"model\.fc\.weight in .* is damaged"):
        extracted(path, tmp_path / "m")
    assert [one.name for one in tmp_path.iterdir()] == ["c.pt"]


class Meddled(LocalFile):
    """A local file that somebody appends to while it is read."""

    def read_at(self, offset: int, size: int) -> bytes:
        data = super().read_at(offset, size)
        with self.path.open("ab") as file:
            file.write(b"x")
        return data


def test_a_file_that_changes_while_it_is_read_gives_no_result(tmp_path: Path) -> None:
    path = save({"model": drafter_tensors()}, tmp_path / "c.pt")
    with Meddled(path) as source, pytest.raises(CheckpointError, match="changed its size"):
        extract_weights(source, tmp_path / "m")
    assert [one.name for one in tmp_path.iterdir()] == ["c.pt"]


def test_memory_is_bounded_by_blocks(tmp_path: Path) -> None:
    path = save({"model": drafter_tensors() | {"layers.0.large": torch.zeros(16 * BLOCK_BYTES // 4)}}, tmp_path / "c.pt")
    for cast in ("keep", "bf16"):
        tracemalloc.start()
        extracted(path, tmp_path / "m", cast=cast)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 6 * BLOCK_BYTES, cast


class Far(LocalFile):
    """A file behind a slow line: counts round trips."""

    trips = 0

    def read_at(self, offset: int, size: int) -> bytes:
        self.trips += 1
        return super().read_at(offset, size)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.trips += 1
        return [LocalFile.read_at(self, offset, size) for offset, size in ranges]


def test_planning_takes_few_round_trips_and_the_stream_goes_anywhere(tmp_path: Path) -> None:
    tensors = drafter_tensors(layers=12)
    path = save(training_state(tensors), tmp_path / "c.pt")
    with Far(path) as source:
        plan = plan_extraction(open_table(source))
        assert len(plan.tensors) == 135
        assert source.trips <= 8
        stream = b"".join(plan.stream())
    assert len(stream) == plan.size_bytes
    (tmp_path / "m").write_bytes(stream)
    assert_equal(tmp_path / "m", tensors)
    extracted(path, tmp_path / "n")
    assert (tmp_path / "n").read_bytes() == stream


def test_a_directory_of_no_known_kind_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        extract_weights_from_dir(tmp_path, tmp_path / "m")
    with pytest.raises(CheckpointError, match="There is no checkpoint directory"):
        extract_weights_from_dir(tmp_path / "absent", tmp_path / "m")
