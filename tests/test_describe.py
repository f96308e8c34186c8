"""`dflash-eval describe`: on the terminal, as JSON, on a host of the inventory, and with a config to write."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import main

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "deployments" / "demo"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train") / "step-00055.pt"
    maker = [sys.executable, str(DEMO / "make_checkpoints.py"), str(DEMO / "drafters" / "step-00055"), str(path), "--step", "55"]
    subprocess.run(maker, check=True)
    return path


def describe(tmp_path: Path, *words: str) -> int:
    return main(["describe", *words, "--home", str(tmp_path / "home")])


def test_a_person_sees_every_field_with_its_origin(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "170")
    assert describe(tmp_path, str(checkpoint)) == 0
    out = capsys.readouterr().out
    assert "DFlash drafter in a training file without a config: 2 layers, 3 taps, block of 8 rows, 7 drafted tokens" in out
    (line,) = [line for line in out.splitlines() if line.startswith("mask_token_id")]
    assert line.split() == ["mask_token_id", "3", "read", "the", "trainer's", "saved", "args", "mask_token_id"]
    assert "Not stated, and without effect so: mask_embedding" in out
    assert "warning" not in out


def test_programs_get_the_same_as_json(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(tmp_path, str(checkpoint), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["description_version"], said["format"], said["step"], said["warnings"]) == (1, "torch-zip", 55, [])
    assert said["spec"]["tap_indices"] == [2, 5, 7]


def test_a_written_config_makes_a_drafter_directory_of_it_and_nothing_is_overwritten(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "config.json"
    assert describe(tmp_path, str(checkpoint), "--write-config", str(target)) == 0
    assert json.loads(target.read_text())["dflash_config"]["target_layer_ids"] == [1, 4, 6]
    before = target.read_bytes()
    assert describe(tmp_path, str(checkpoint), "--write-config", str(target)) == 2
    assert "is there already" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_a_checkpoint_on_a_host_of_the_inventory(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(f"hosts:\n  train: {{via: local, work_dir: {checkpoint.parent}, roles: [train]}}\n")
    assert describe(tmp_path, "train:step-*.pt", "--hosts", str(hosts), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["host"], Path(said["path"]).name) == ("train", "step-00055.pt")


def test_a_wrong_option_is_one_sentence(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(tmp_path, str(checkpoint), "--block-size", "16") == 2
    err = capsys.readouterr().err
    assert err.startswith("--block-size is 16, but the trainer's saved args block_size is 8.")
    assert "Traceback" not in err
