"""How a target is read, by hand-made figures: where it fits, where it does not, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_model.errors import ConfigError, HostBusy, HostError
from dflash_model.target.backbone import load_backbone
from dflash_model.target.extraction import open_target
from dflash_model.target.room import Choice, choose_extraction, free_bytes_of, free_host_bytes
from dflash_model.target.weight_files import WeightFiles, open_weights
from tests.tiny_targets import DEMO_TARGET, tiny_model, tiny_multimodal_model

GIB = 1 << 30
LAYER, ENDS = 2 * GIB, 4 * GIB
"""Bytes in bfloat16: three layers of 2 GiB, embedding and head of 2 GiB each: 10 GiB."""


@pytest.fixture
def files() -> WeightFiles:
    sizes = {f"model.layers.{k}.mlp.weight": (LAYER // 2, LAYER) for k in range(3)}
    sizes |= {"model.embed_tokens.weight": (GIB, 2 * GIB), "lm_head.weight": (GIB, 2 * GIB), "model.visual.x": (GIB, GIB)}
    return WeightFiles(places=dict.fromkeys(sizes, Path("x")), sizes=sizes, prefix="model.")


def _choose(files: WeightFiles, asked: str, device: str, free_gib: float, **more: float) -> Choice:
    return choose_extraction(asked, files, dtype=torch.bfloat16, device=device, free_bytes=int(free_gib * GIB), **more)


def test_sizes_are_those_of_decoder_and_head_in_the_dtype_of_the_run(files: WeightFiles) -> None:
    assert files.parameter_bytes(torch.bfloat16) == 3 * LAYER + ENDS
    assert files.parameter_bytes(torch.float32) == 2 * (3 * LAYER + ENDS)
    assert files.layer_bytes(torch.bfloat16) == LAYER


def test_on_a_cpu_the_target_may_take_four_fifths_of_what_is_free(files: WeightFiles) -> None:
    assert _choose(files, "auto", "cpu", 12.5) == Choice(mode="full", reason="10.0 GiB of weights, 12.5 GiB of memory free")
    assert _choose(files, "auto", "cpu", 12.4).mode == "streaming"
    for asked in ("full", "streaming"):
        assert _choose(files, asked, "cpu", 1) == Choice(
            mode=asked, reason="asked for; 10.0 GiB of weights, 1.0 GiB of memory free"
        )


def test_on_a_gpu_what_does_not_fit_is_streamed_or_refused_with_the_numbers(files: WeightFiles) -> None:
    assert _choose(files, "auto", "cuda", 11).mode == "full"
    assert _choose(files, "auto", "cuda", 10.9).mode == "streaming"
    assert _choose(files, "auto", "cuda", 80, max_gpu_gib=6).mode == "streaming"
    assert _choose(files, "streaming", "cuda", 5).mode == "streaming"
    with pytest.raises(HostBusy, match=r"10\.0 GiB of weights, 10\.9 GiB of GPU memory free; 11\.0 GiB are needed"):
        _choose(files, "full", "cuda", 10.9)
    with pytest.raises(HostBusy, match=r"80\.0 GiB of GPU memory free, at most 4 GiB allowed; 5\.0 GiB are needed"):
        _choose(files, "auto", "cuda", 80, max_gpu_gib=4)
    with pytest.raises(ConfigError, match="no extraction 'fast'"):
        _choose(files, "fast", "cpu", 80)


def _system(root: Path, **contents: str) -> Path:
    names = {"meminfo": "proc/meminfo", "max": "max", "current": "current", "stat": "stat"}
    for name, content in contents.items():
        path = root / (names[name] if name == "meminfo" else f"sys/fs/cgroup/memory.{names[name]}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_free_memory_is_the_kernels_estimate_and_a_control_groups_limit(tmp_path: Path) -> None:
    meminfo = "MemTotal:  4000 kB\nMemFree: 10 kB\nMemAvailable:    3000 kB\n"
    assert free_host_bytes(_system(tmp_path, meminfo=meminfo)) == 3000 * 1024
    assert free_host_bytes(_system(tmp_path, max="max\n", current="5\n")) == 3000 * 1024
    stat = "anon 700000\ninactive_file 200000\nactive_file 100000\n"
    assert free_host_bytes(_system(tmp_path, max="2000000\n", current="1000000\n", stat=stat)) == 2_000_000 - 700_000
    assert free_host_bytes(_system(tmp_path, max="500000\n")) == 0
    assert 0 < free_bytes_of("cpu") < 1 << 50


def test_auto_loads_whole_what_cannot_be_read_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model("gemma2").save_pretrained(tmp_path)
    monkeypatch.setattr("dflash_model.target.extraction.free_bytes_of", lambda _device: 1000)
    target = open_target(tmp_path, dtype="float32")
    assert (target.choice.mode, target.streamed) == ("full", None)
    assert "too little; but The target's embed_tokens" in target.choice.reason
    assert open_target(DEMO_TARGET, dtype="float32").choice.mode == "streaming"


def test_a_multimodal_checkpoint_is_measured_without_its_vision_tower(tmp_path: Path) -> None:
    whole = tiny_multimodal_model()
    whole.save_pretrained(tmp_path)
    files = open_weights(tmp_path)
    text = sum(p.numel() for name, p in whole.named_parameters() if "visual" not in name)
    assert files.parameter_bytes(torch.float32) == 4 * text
    assert not [name for name in files.names() if "visual" in name]


def test_a_gpu_that_others_use_is_left_alone_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (GIB, 80 * GIB))
    for load in (load_backbone, open_target):
        with pytest.raises(HostBusy, match=r"4 MiB of weights, 1\.0 GiB of GPU memory free"):
            load(DEMO_TARGET, dtype="float32", device="cuda", **({} if load is load_backbone else {"extraction": "full"}))  # type: ignore[operator]


def test_several_devices_are_never_streamed_and_a_missing_gpu_is_the_hosts_fault() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    with pytest.raises(ConfigError, match="onto one device"):
        open_target(DEMO_TARGET, dtype="float32", device="auto", extraction="streaming")
    with pytest.raises(HostError, match="torch sees no GPU"):
        open_target(DEMO_TARGET, dtype="float32", device="cuda")
