"""describe over SSH: a run directory of SpecForge and a sharded drafter on a host that is only read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.describing import look_at
from tests.lab_hosts import LabHosts
from tests.tiny_drafters import GEOMETRY, zlab_config

pytestmark = pytest.mark.lab
ARGS = {"block_size": 5, "mask_token_id": 3, "target_layer_ids": [1, 3, 4], "rope_theta": 100.0, "rms_norm_eps": 1e-5}


def weights() -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in GEOMETRY.tensor_shapes().items()}


def content_of(path: Path, save: object) -> bytes:
    if isinstance(save, dict) and all(isinstance(value, torch.Tensor) for value in save.values()):
        save_file(save, path)
    else:
        torch.save(save, path)
    content = path.read_bytes()
    path.unlink()
    return content


def test_a_specforge_run_on_a_training_host_is_described_from_its_index(lab_hosts: LabHosts, tmp_path: Path) -> None:
    host = lab_hosts.host("eval")
    for step in (9, 10):
        state = {"draft_state_dict": weights(), "global_step": step, "args": ARGS}
        lab_hosts.put("eval", f"run dir/r-step{step}/training_state.pt", content_of(tmp_path / "s", state))
    run = lab_hosts.on_disk("eval", host.work_dir) / "run dir"
    (run / "r-latest").symlink_to("r-step9", target_is_directory=True)
    before = {one: one.stat().st_mtime_ns for one in run.rglob("*")}
    found = look_at(host, "run dir", config_host=host)
    assert (found.description["step"], found.description["format"]) == (9, "torch-zip")
    assert found.description["path"].endswith("run dir/r-step9/training_state.pt")
    assert {one: one.stat().st_mtime_ns for one in run.rglob("*")} == before


def test_a_sharded_drafter_on_a_host_is_described_from_its_headers(lab_hosts: LabHosts, tmp_path: Path) -> None:
    host = lab_hosts.host("eval")
    names = sorted(weights())
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        lab_hosts.put("eval", f"d/{file}", content_of(tmp_path / "s", {name: weights()[name] for name in held}))
    index = {"metadata": {}, "weight_map": {name: file for file, held in halves.items() for name in held}}
    lab_hosts.put("eval", "d/model.safetensors.index.json", json.dumps(index).encode())
    lab_hosts.put("eval", "d/config.json", json.dumps(zlab_config()).encode())
    found = look_at(host, str(host.work_dir / "d"), config_host=host)
    assert found.reading.spec.tap_indices == (2, 4, 5)
    assert found.description["tensors"] == len(names)
    assert found.description["host"] == "eval"
