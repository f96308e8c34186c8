"""torch.save files, zip and legacy: every byte as torch.load gives it, plain data beside, refusals only as a list."""

import argparse
import collections
import dataclasses
import enum
import os
import pathlib
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash_model.checkpoint.source import CountedSource, LocalFile
from dflash_model.checkpoint.torch_file import TorchFile, read_torch_file
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import LEGACY, UNTYPED, bytes_in, bytes_of, drafter_tensors, many_tensors, save

FORMS = pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])


@dataclasses.dataclass
class TrainConfig:
    """Importable here, and by no evaluator."""

    lr: float
    path: pathlib.PurePosixPath


class Phase(enum.Enum):
    WARM = "warm"


class Untouchable:
    """Runs when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def opened(path: Path) -> TorchFile:
    return read_torch_file(LocalFile(path))


@FORMS
def test_every_dtype_and_layout_is_byte_equal_to_torch_load(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = many_tensors(without=UNTYPED if options else frozenset())
    path = save({"model_state_dict": saved, "step": 3}, tmp_path / "c.pt", **options)
    file = opened(path)
    loaded = torch.load(path, weights_only=True)["model_state_dict"]
    assert file.format == ("torch-legacy" if options else "torch-zip")
    assert [entry_path[1] for entry_path in file.by_path()] == list(loaded)
    assert file.refused() == {}
    for name, tensor in loaded.items():
        entry = file.by_path()["model_state_dict", name]
        assert (entry.shape, entry.geometry.stride) == (tuple(tensor.shape), tensor.stride()), name
        assert entry.size_bytes == tensor.numel() * tensor.element_size()
        assert bytes_in(file, "model_state_dict", name) == bytes_of(tensor), name


def test_dtypes_that_torch_cannot_load_from_its_own_legacy_form_come_out_as_saved(tmp_path: Path) -> None:
    saved = {str(dtype): (torch.randn(5, 2) * 50).to(dtype).t() for dtype in UNTYPED}
    path = save(saved, tmp_path / "c.pt", **LEGACY)
    with pytest.raises(AttributeError):
        torch.load(path)
    file = opened(path)
    assert {name[0]: bytes_in(file, *name) for name in file.by_path()} == {
        name: bytes_of(tensor) for name, tensor in saved.items()
    }


def test_reading_a_transposed_tensor_in_storage_order_would_be_wrong(tmp_path: Path) -> None:
    file = opened(save({"t": torch.arange(6.0).reshape(2, 3).t()}, tmp_path / "c.pt"))
    offset, size = file.storage_range(file.tensors()["t"])
    in_storage_order = (tmp_path / "c.pt").read_bytes()[offset : offset + size]
    assert in_storage_order == bytes_of(torch.arange(6.0))
    assert bytes_in(file, "t") == bytes_of(torch.tensor([0.0, 3, 1, 4, 2, 5])) != in_storage_order


@FORMS
def test_ties_and_views_share_a_storage(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = torch.arange(10.0)
    tensors = opened(save({"a": whole, "b": whole, "c": whole[4:6], "d": torch.ones(1)}, tmp_path / "c.pt", **options)).tensors()
    assert tensors["a"].storage == tensors["b"].storage == tensors["c"].storage != tensors["d"].storage
    assert tensors["c"].geometry.storage_offset == 4
    assert tensors["c"].storage.size_bytes == 40
    assert (tensors["a"].storage.crc32 is None) == bool(options)


@FORMS
def test_plain_data_comes_out_whatever_classes_it_used(tmp_path: Path, options: dict[str, Any]) -> None:
    saved = {
        "model": {"w": torch.ones(2)}, "step": 1200, "epoch": np.int64(3), "loss": np.float32(0.5), "best": float("inf"),
        "args": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), out=pathlib.PosixPath("/a/b"), nested=argparse.Namespace(k=None)),
        "config": TrainConfig(lr=0.1, path=pathlib.PurePosixPath("x/y")), "phase": Phase.WARM,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "counts": collections.Counter("aab"), "tags": {"one"}, "raw": b"abc", "rng": np.random.default_rng(0).bit_generator.state,
    }  # fmt: skip
    plain = opened(save(saved, tmp_path / "c.pt", **options)).plain()
    assert "model" not in plain
    assert (plain["step"], plain["epoch"], plain["loss"], plain["best"]) == (1200, 3, 0.5, "inf")
    assert plain["args"] == {"lr": 1e-3, "betas": [0.9, 0.95], "out": "/a/b", "nested": {"k": None}}
    assert plain["config"] == {"__type__": f"{__name__}.TrainConfig", "lr": 0.1, "path": "x/y"}
    assert plain["phase"] == {"__type__": f"{__name__}.Phase", "args": ["warm"]}
    assert plain["optimizer"] == {"param_groups": [{"lr": 0.1, "params": [0]}]}
    assert (plain["counts"], plain["tags"], plain["raw"]) == ({"a": 2, "b": 1}, ["one"], {"__type__": "bytes", "size": 3})
    assert plain["rng"]["bit_generator"] == "PCG64"


@FORMS
def test_reading_runs_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    marker = tmp_path / "marker"
    path = save({"model": {"w": torch.ones(2)}, "optimizer": [Untouchable(marker)], "step": 1}, tmp_path / "c.pt", **options)
    file = opened(path)
    assert bytes_in(file, "model", "w") == bytes_of(torch.ones(2))
    assert file.plain()["optimizer"] == [{"__type__": "posix.system", "args": [f"touch {marker}"]}]
    file.content_digest()
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()


class Sub(torch.Tensor):
    """A tensor subclass."""


def odd_tensors() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse tensor": torch.eye(3).to_sparse(), "csr": torch.eye(3).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "meta": torch.ones(2, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "lazy view": torch.ones(2, dtype=torch.complex64).conj(), "subclass": torch.ones(2).as_subclass(Sub),
            "whole nn.Module": torch.nn.Linear(2, 2), "safetensors lacks": torch.ones(2, dtype=torch.complex128),
            "numpy array": np.ones(3),
        }  # fmt: skip


REASONS = {"csr": "sparse tensor", "nested": "nested tensor", "meta": "meta tensor", "quantized": "quantized tensor"}


def test_each_odd_tensor_has_its_own_reason_and_hinders_nobody(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save({"odd": odd_tensors(), "model": {"w": torch.ones(2)}}, path)
    file = opened(path)
    assert list(file.tensors()) == ["model.w"]
    found = {name[1]: refusal.reason for name, refusal in file.refused().items()}
    assert list(found) == list(odd_tensors())
    for name, reason in found.items():
        assert REASONS.get(name, name) in reason, name


def test_a_single_tensor_and_a_list_have_paths_too(tmp_path: Path) -> None:
    assert list(opened(save(torch.ones(2), tmp_path / "a.pt")).by_path()) == [()]
    assert list(opened(save([torch.ones(2), {3: torch.ones(1)}], tmp_path / "b.pt")).by_path()) == [("0",), ("1", "3")]


def test_the_digest_follows_content_and_costs_little(tmp_path: Path) -> None:
    saved = {"model": drafter_tensors(hidden=64), "step": 1}
    first = save(saved, tmp_path / "a.pt")
    renamed = shutil.copy(first, tmp_path / "b.pt")
    source = CountedSource(LocalFile(first))
    digest = read_torch_file(source).content_digest()
    assert source.bytes_read < source.size_bytes / 2
    assert opened(Path(renamed)).content_digest() == digest
    saved["model"]["norm.weight"][3] += 1
    assert opened(save(saved, tmp_path / "c.pt")).content_digest() != digest


def test_without_checksums_the_digest_reads_everything(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"w": torch.arange(300_000)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert opened(path).tensors()["w"].storage.crc32 is None
    digest = opened(path).content_digest()
    assert bytes_in(opened(path), "w") == bytes_of(torch.arange(300_000))
    data = bytearray(path.read_bytes())
    data[1_000_000] ^= 1
    path.write_bytes(data)
    assert opened(path).content_digest() != digest


def test_a_flipped_bit_is_noticed_in_whole_tensors_and_in_views(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    path = save({"whole": base, "view": base[:3], "other": torch.arange(6.0).reshape(2, 3).t()}, tmp_path / "c.pt")
    file = opened(path)
    offset, _ = file.storage_range(file.tensors()["whole"])
    elsewhere, _ = file.storage_range(file.tensors()["other"])
    data = bytearray(path.read_bytes())
    data[offset + 399] ^= 1  # outside the view
    data[elsewhere] ^= 1
    path.write_bytes(data)
    for name in ("whole", "view", "other"):
        with pytest.raises(CheckpointError, match=f"{name} in .*c.pt is damaged: the CRC32"):
            bytes_in(opened(path), name)


def test_a_shared_storage_is_checked_once(tmp_path: Path) -> None:
    base = torch.randn(2_000_000)
    path = save({str(i): base[i * 100 : (i + 1) * 100] for i in range(50)}, tmp_path / "c.pt")
    source = CountedSource(LocalFile(path))
    file = read_torch_file(source)
    for i in range(50):
        assert bytes_in(file, str(i)) == bytes_of(base[i * 100 : (i + 1) * 100])
    assert source.bytes_read < 2 * source.size_bytes


def rewritten(path: Path, change: dict[bytes, bytes]) -> Path:
    """The same zip with data.pkl changed (no compression, right CRCs)."""
    out = path.with_suffix(".changed.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for record in old.infolist():
            data = old.read(record)
            if record.filename.endswith("data.pkl"):
                for before, after in change.items():
                    assert before in data
                    data = data.replace(before, after)
            new.writestr(record.filename, data)
    return out


def test_geometry_is_checked_against_the_storage_and_the_storage_against_the_file(tmp_path: Path) -> None:
    path = save({"w": torch.arange(6.0)}, tmp_path / "c.pt")
    assert bytes_in(opened(rewritten(path, {b"cpu": b"cpu"})), "w") == bytes_of(torch.arange(6.0))
    shape = b"K\x06\x85"  # (6,)
    reaching = opened(rewritten(path, {shape: b"K\x07\x85"}))
    assert "reaches to byte 28 of a storage of 24" in reaching.refused()["w",].reason
    negative = opened(rewritten(path, {shape: b"J\xff\xff\xff\xff\x85"}))
    assert "sizes are no sizes" in negative.refused()["w",].reason
    claimed = opened(rewritten(path, {b"cpuq\x06K\x06": b"cpuq\x06K\x07"}))
    assert "storage of 24 bytes where its pickle claims 28" in claimed.refused()["w",].reason
    missing = opened(rewritten(path, {b"X\x01\x00\x00\x000": b"X\x01\x00\x00\x007"}))
    assert "its storage is missing" in missing.refused()["w",].reason


def test_a_tensor_that_repeats_a_few_bytes_to_terabytes_is_refused(tmp_path: Path) -> None:
    file = opened(save({"bomb": torch.ones(1).expand(1 << 40), "fine": torch.ones(1).expand(100)}, tmp_path / "c.pt"))
    assert "repeats its 4 bytes of storage to 4398046511104" in file.refused()["bomb",].reason
    assert bytes_in(file, "fine") == bytes_of(torch.ones(100))


def test_files_that_are_no_checkpoints_say_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    for content, reason in (
        (b"", "is empty"),
        (b"hello world", "starts with 68 65 6c 6c"),
        (b"\x80\x04N.", "not one of torch.save"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=reason):
            opened(path)
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        LocalFile(tmp_path / "absent.pt")
    with pytest.raises(CheckpointError, match="not a regular file"):
        LocalFile(tmp_path)


def test_random_damage_to_an_unchecked_pickle_is_inert_or_refused_in_a_sentence(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"model": drafter_tensors(), "args": argparse.Namespace(lr=np.float32(1)), "step": 1}, tmp_path / "c.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    data = path.read_bytes()
    begin = data.index(b"\x80\x02")
    rng = np.random.default_rng(0)
    read, sentences = 0, []
    for _ in range(400):
        changed = bytearray(data)
        for place in rng.integers(begin, begin + 2000, rng.integers(1, 4)):
            changed[place] = rng.choice(list(b"]})(uRbhq\x85\x86\x87te0\x81\x93\x92c\x00\xff\x8a\\"))
        path.write_bytes(changed)
        try:
            file = opened(path)
            file.plain()
            for entry in file.by_path():
                bytes_in(file, *entry)
            read += 1
        except CheckpointError as exc:
            sentences.append(exc.problem)
    assert [sentence for sentence in sentences if not sentence.endswith(".")] == []
    assert min(read, len(sentences)) > 20
