"""Loading a target: the text part of what is on disk, completely, in a dtype that holds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_model.errors import CheckpointError, ConfigError, HostError, InputError
from dflash_model.target.backbone import backbone_of, load_backbone, parse_dtype
from tests.tiny_targets import DEMO_TARGET, tiny_model, tiny_multimodal_model


def _copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_TARGET, tmp_path / "copy"))


def test_the_demo_target_loads_in_either_dtype() -> None:
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        backbone = load_backbone(DEMO_TARGET, dtype=name)
        assert (backbone.dtype, backbone.num_layers, backbone.hidden_size, backbone.max_positions) == (dtype, 8, 96, 4096)
        assert not backbone.model.training
        assert backbone.device.type == "cpu"


@pytest.mark.parametrize("name", ["float16", "fp8", "auto"])
def test_float16_and_unknown_dtypes_are_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot be run in {name}"):
        load_backbone(tmp_path / "absent", dtype=name)
    with pytest.raises(ConfigError):
        parse_dtype(name)


def test_a_multimodal_checkpoint_gives_its_text_part_with_its_head(tmp_path: Path) -> None:
    whole = tiny_multimodal_model()
    whole.save_pretrained(tmp_path)
    assert any(name.startswith("model.language_model.layers.0.") for name in load_file(tmp_path / "model.safetensors"))
    backbone = load_backbone(tmp_path, dtype="float32")
    ids = torch.tensor([[5, 7, 11, 13]])
    with torch.no_grad():
        assert torch.equal(backbone.model(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert not [name for name, _ in backbone.model.named_parameters() if "visual" in name]


@pytest.mark.parametrize(("change", "message"), [("drop", "missing keys"), ("add", "unexpected keys")])
def test_a_tensor_too_few_or_too_many_is_refused(tmp_path: Path, change: str, message: str) -> None:
    copy = _copy(tmp_path)
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.3.self_attn.q_norm.weight"
    if change == "drop":
        del tensors[name]
    else:
        name = "model.layers.3.self_attn.surprise.weight"
        tensors[name] = torch.ones(2)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 {message}, such as {name}"):
        load_backbone(copy, dtype="float32")


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    copy = _copy(tmp_path)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(95)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="do not fit its config"):
        load_backbone(copy, dtype="float32")


def test_an_unknown_model_type_and_a_directory_without_weights_are_input_errors(tmp_path: Path) -> None:
    copy = _copy(tmp_path)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "never_heard_of"}))
    with pytest.raises(InputError, match="cannot load the target"):
        load_backbone(copy, dtype="float32")
    (copy / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no weights"):
        load_backbone(copy, dtype="float32")


def test_a_gpu_that_is_not_there_is_the_hosts_fault() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    with pytest.raises(HostError, match="torch sees no GPU"):
        load_backbone(DEMO_TARGET, dtype="float32", device="cuda")


def test_a_model_without_a_list_of_layers_is_named() -> None:
    model = tiny_model("llama")
    del model.model.layers
    with pytest.raises(InputError, match="LlamaForCausalLM has no decoder with layers"):
        backbone_of(model)
