"""The GPU check's steps, on the CPU; on a GPU the same code runs with a larger model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_model.target import gpucheck


def test_without_a_gpu_it_is_skipped_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    assert gpucheck.main(["--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "skipped: torch sees no GPU here"
    assert json.loads(lines[-1])["skipped"] == "torch sees no GPU here"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    gpucheck.make_model(directory, **gpucheck.SIZES["cpu"])
    return directory


def _row(model: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The child's work in this process, which hides the kernels from nobody else."""
    for package in gpucheck.KERNEL_PACKAGES:
        monkeypatch.setitem(sys.modules, package, None)
    return gpucheck._measure(model, "cpu", hide=False)


def test_bfloat16_is_near_float32_and_streaming_gives_the_same_bits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = _row(model, monkeypatch)
    assert set(row["kernels"].values()) == {"torch"}
    assert 1e-4 < row["worst_relative_l2"] < gpucheck.WORST_L2
    assert (row["holds"], row["streaming_same_bits"], row["peak_over_weights"]) == (True, True, None)
    assert row["extract_over_bare_forward"] > 0


def test_another_computation_does_not_hold(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    wanted = load_file(model / "reference.safetensors")
    shifted = wanted["hidden_states"].roll(1, dims=0).contiguous()
    save_file(wanted | {"hidden_states": shifted}, tmp_path / "reference.safetensors")
    assert _row(tmp_path, monkeypatch)["holds"] is False


def test_the_dry_run_gives_one_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpucheck, "find_spec", lambda _name: None)
    assert gpucheck.main(["--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["name"], found["device"], found["skipped"]) == ("gpucheck", "cpu", None)
    assert found["rows"][0] == {"variant": "installed kernels", "skipped": "not installed: fla, causal_conv1d"}
    assert found["rows"][1]["variant"] == "torch fallback"
    assert found["rows"][1]["holds"] is True
    assert found["versions"]["torch"] == torch.__version__


def test_a_child_that_dies_or_hangs_is_a_row_that_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setitem(gpucheck.CHILD_TIMEOUT_S, "cpu", 2)
    for script, said in (
        ("echo 'RuntimeError: 0 active drivers' >&2; exit 1", "RuntimeError: 0 active drivers"),
        ("exec sleep 60", "no answer"),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        row = gpucheck._run_child(tmp_path, "cpu", hide=True)
        assert row["holds"] is False
        assert said in row["failed"]
