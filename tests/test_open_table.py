"""Formats are told by content: extensions lie, and first bytes can be alike."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.checkpoint.open_table import open_table
from dflash_model.checkpoint.source import LocalFile
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import LEGACY, drafter_tensors, save


def test_extensions_do_not_matter(tmp_path: Path) -> None:
    save(drafter_tensors(), tmp_path / "a.safetensors")
    save(drafter_tensors(), tmp_path / "b.bin", **LEGACY)
    save_file(drafter_tensors(), tmp_path / "c.pt")
    formats = [open_table(LocalFile(tmp_path / name)).format for name in ("a.safetensors", "b.bin", "c.pt")]
    assert formats == ["torch-zip", "torch-legacy", "safetensors"]


def test_a_safetensors_header_size_that_starts_like_a_pickle(tmp_path: Path) -> None:
    for padding in range(0, 256, 8):
        save_file({"w": torch.ones(2)}, tmp_path / "f", metadata={"k": "x" * padding})
        if (tmp_path / "f").read_bytes()[0] == 0x80:
            break
    else:
        pytest.fail("no header size of 0x80")
    assert open_table(LocalFile(tmp_path / "f")).format == "safetensors"


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content in (b"", b"x", b"\x00" * 100, b"GGUF\x03\x00\x00\x00"):
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(CheckpointError):
            open_table(LocalFile(tmp_path / "f"))
