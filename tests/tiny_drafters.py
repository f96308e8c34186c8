"""Small random drafters and a small z-lab config for tests, and the trained pair that lies in tests/data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.geometry import Geometry
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope

PAIR = Path(__file__).parent / "data" / "tiny-qwen3"
FULL = MaskPolicy(in_block="bidirectional")

GEOMETRY = Geometry(
    hidden_size=24, intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, num_taps=3, attention_bias=False
)  # fmt: skip

SPEC = DrafterSpec(
    family="dflash", source_format="zlab", tap_indices=(2, 4, 5), block_size=5, shift=0, mask_token_id=3, hidden_size=24,
    intermediate_size=40, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5, attention_bias=False,
    vocab_size=50, num_target_layers=6, rope=Rope(theta=100.0, dims=8), layer_masks=(FULL, FULL),
)  # fmt: skip


DFLASH2 = replace(
    SPEC, family="dflash2", conv_kernel_size=3, conv_group_size=8, selector_rank=6, selector_top_k=7, shift=0,
)  # fmt: skip
"""SPEC with convolutions and a selector."""

LINEAR = (("factor", 3.0),)
LLAMA3 = (("factor", 4.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0), ("original_max_position_embeddings", 40.0))
YARN = (
    ("attention_factor", 1.3), ("beta_fast", 4.0), ("beta_slow", 1.0), ("factor", 4.0),
    ("original_max_position_embeddings", 40.0), ("truncate", 0.0),
)  # fmt: skip
ROPES = {
    "linear": Rope(theta=100.0, dims=8, type="linear", scaling=LINEAR),
    "llama3": Rope(theta=100.0, dims=8, type="llama3", scaling=LLAMA3),
    "yarn": Rope(theta=100.0, dims=8, type="yarn", scaling=YARN),
    "yarn, truncated bounds": Rope(theta=100.0, dims=8, type="yarn", scaling=(*YARN[:-1], ("truncate", 1.0))),
    "interleaved": Rope(theta=100.0, dims=8, interleaved=True),
    "partial, interleaved": Rope(theta=100.0, dims=4, interleaved=True),
    "partial": Rope(theta=100.0, dims=4, sections=(1, 1)),
}


def geometry_of(spec: DrafterSpec) -> Geometry:
    return Geometry(
        hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size, num_layers=spec.num_layers,
        num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, num_taps=spec.num_taps,
        attention_bias=spec.attention_bias,
    )  # fmt: skip


def random_weights(spec: DrafterSpec, *, seed: int = 0) -> dict[str, Tensor]:
    """Seeded weights whose norms are far from 1 and whose attention is not flat."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in geometry_of(spec).tensor_shapes().items():
        if "norm" in name:
            weights[name] = 0.5 + torch.rand(shape, generator=generator)
        else:
            weights[name] = torch.randn(shape, generator=generator) * (1.5 / shape[-1] ** 0.5)
    return weights | _own_tensors(spec, set(weights), generator)


def _own_tensors(spec: DrafterSpec, known: set[str], generator: torch.Generator) -> dict[str, Tensor]:
    """What the spec adds to the plain backbone; the vocabulary map skips tokens at random."""
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Drafter(spec).state_dict().items()}
    own = {name: torch.randn(shapes[name], generator=generator) * 0.5 for name in sorted(shapes.keys() - known - {"d2t"})}
    for name in own:
        if name.endswith("kernel_projection.weight"):
            own[name] /= spec.hidden_size**0.5
    if spec.draft_vocab_size is not None:
        tokens = torch.randperm(spec.vocab_size or 0, generator=generator)[: spec.draft_vocab_size].sort().values
        own["d2t"] = tokens - torch.arange(len(tokens))
    return own


def random_drafter(directory: Path, spec: DrafterSpec = SPEC, *, seed: int = 0) -> tuple[Drafter, dict[str, Tensor]]:
    """A drafter loaded from a file of `random_weights`, and those weights."""
    weights = random_weights(spec, seed=seed)
    save_file(weights, directory / "model.safetensors")
    return load_drafter(directory / "model.safetensors", spec), weights


def with_masks(spec: DrafterSpec, *policies: MaskPolicy) -> DrafterSpec:
    return replace(spec, layer_masks=policies)


def zlab_config(**changes: Any) -> dict[str, Any]:
    """A config.json of GEOMETRY; a change to `...` removes the key, dflash_config changes are merged."""
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 5, "head_dim": 8,
        "hidden_act": "silu", "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "num_target_layers": 6, "rms_norm_eps": 1e-05, "rope_theta": 100.0, "rope_scaling": None,
        "vocab_size": 50, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 4]},
    }  # fmt: skip
    nested = changes.pop("dflash_config", {})
    if nested is ... or not isinstance(nested, dict):
        config["dflash_config"] = nested
    else:
        config["dflash_config"] = _changed(config["dflash_config"], nested)
    return _changed(config, changes)


def _changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (values | changes).items() if value is not ...}


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
