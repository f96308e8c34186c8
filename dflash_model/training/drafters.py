"""Drafters to be trained: the spec of a training config, seeded first weights, and the z-lab layout they are exported in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.policies import FULL, SLIDING
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.storage import write_json
from dflash_model.target.tables import Tables
from dflash_model.target.tensor_file import write_tensors
from dflash_model.training.batches import WEIGHTS, generator_of
from dflash_model.training.config import DrafterConfig

WEIGHTS_NAME, CONFIG_NAME = "model.safetensors", "config.json"
INITIAL_STD = 0.02


def spec_of(config: DrafterConfig, *, tables: Tables, num_target_layers: int) -> DrafterSpec:
    """The spec of the drafter that `config` describes, for this target."""
    kinds = layer_types(config)
    return DrafterSpec(
        family="dflash",
        source_format="zlab",
        tap_indices=tuple(layer + 1 for layer in config.target_layer_ids),
        block_size=config.block_size,
        shift=int(config.sample_from_anchor),
        mask_token_id=config.mask_token_id,
        hidden_size=int(tables.facts["hidden_size"]),
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=False,
        vocab_size=int(tables.facts["vocab_rows"]),
        num_target_layers=num_target_layers,
        rope=Rope(theta=config.rope_theta, dims=config.rotary_dims or config.head_dim),
        layer_masks=tuple(
            MaskPolicy(
                in_block="causal" if (kind == SLIDING if config.is_causal is None else config.is_causal) else "bidirectional",
                window=config.sliding_window if kind == SLIDING else None,
            )
            for kind in kinds
        ),
    )


def layer_types(config: DrafterConfig) -> tuple[str, ...]:
    """One of "full_attention", "sliding_attention" per layer."""
    return config.layer_types or (FULL,) * config.num_layers


def make_drafter(spec: DrafterSpec, *, seed: int, name: str) -> Drafter:
    """A drafter with seeded first weights: matrices normal with INITIAL_STD, norms 1."""
    drafter = Drafter(spec, name=name)
    generator = generator_of(seed, WEIGHTS, 0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=INITIAL_STD, generator=generator)
            else:
                parameter.fill_(1.0)
    return drafter


def random_head(tables: Tables, *, seed: int) -> Tensor:
    """[V, H] a head that nobody trained, as one left out of a checkpoint is initialised."""
    head = torch.empty_like(tables.head, dtype=torch.float32)
    nn.init.normal_(head, std=INITIAL_STD, generator=generator_of(seed, WEIGHTS, 1))
    return head


def zlab_config(config: DrafterConfig, spec: DrafterSpec) -> dict[str, Any]:
    """The z-lab config.json of this drafter; `spec_from_zlab` reads the same spec back."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope.theta}
    if spec.rope.dims != spec.head_dim:
        rope["partial_rotary_factor"] = spec.rope.dims / spec.head_dim
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_parameters": rope,
        "vocab_size": spec.vocab_size,
        "num_target_layers": spec.num_target_layers,
        "block_size": spec.block_size,
        "layer_types": list(layer_types(config)),
        "use_sliding_window": SLIDING in layer_types(config),
        "sliding_window": config.sliding_window if SLIDING in layer_types(config) else None,
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": spec.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
    }
    if config.is_causal is not None:
        values["is_causal"] = config.is_causal
    if spec.shift:
        values["dflash_config"]["sample_from_anchor"] = True
    return values


def export_zlab(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors: the weights first, so that a directory with a config is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype) for name, tensor in weights.items()}
    write_tensors(directory / WEIGHTS_NAME, tensors, metadata={"format": "pt"})
    write_json(directory / CONFIG_NAME, dict(config) | {"dtype": str(dtype).removeprefix("torch.")})
