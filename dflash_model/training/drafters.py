"""Drafters to be trained: the spec of a training config, seeded first weights, and the z-lab layout they are exported in.

Tables of a drafter's own begin as the target's; the embedding stays so, the head is trained (DeepSpec freezes both).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.convolution import BlockConvolution
from dflash_model.drafter.policies import FULL, SLIDING
from dflash_model.drafter.selector import CandidateSelector
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
    two = config.family == "dflash2"
    return DrafterSpec(
        family=config.family,
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
        owns_embedding=config.own_tables,
        owns_head=config.own_tables or config.draft_vocab_size is not None,
        draft_vocab_size=config.draft_vocab_size,
        conv_kernel_size=config.conv_kernel_size if two else None,
        conv_group_size=config.conv_group_size if two else None,
        selector_rank=config.selector_rank if two else None,
        selector_top_k=config.selector_top_k if two else None,
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


def make_drafter(spec: DrafterSpec, tables: Tables, *, frequencies: Tensor, seed: int, name: str) -> Drafter:
    """A drafter with seeded first weights: matrices normal with INITIAL_STD, norms 1, convolutions the identity.

    `frequencies` [V]: how often each token stands in the training answers; a reduced vocabulary keeps the most frequent.
    """
    drafter = Drafter(spec, name=name)
    generator = generator_of(seed, WEIGHTS, 0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=INITIAL_STD, generator=generator)
            else:
                parameter.fill_(1.0)
        for module in drafter.modules():
            if isinstance(module, BlockConvolution):
                module.base_kernel.zero_()[:, 0] = 1.0
                module.kernel_projection.weight.zero_()
            elif isinstance(module, CandidateSelector):
                module.predecessor_codebook.normal_(generator=generator)
                module.hidden_projection.weight.normal_(std=spec.hidden_size**-0.5, generator=generator)
                module.successor_codebook.zero_()
        _copy_tables(drafter, tables, frequencies)
    return drafter


def _copy_tables(drafter: Drafter, tables: Tables, frequencies: Tensor) -> None:
    kept = torch.arange(len(tables.head))
    if drafter.spec.draft_vocab_size is not None:
        kept = frequencies.topk(drafter.spec.draft_vocab_size).indices.sort().values
        assert drafter.d2t is not None
        drafter.d2t.copy_(kept - torch.arange(len(kept)))
    if drafter.lm_head is not None:
        drafter.lm_head.weight.copy_(tables.head[kept])
    if drafter.embed_tokens is not None:
        drafter.embed_tokens.weight.copy_(tables.embed)
        drafter.embed_tokens.requires_grad_(False)


def random_head(tables: Tables, *, seed: int) -> Tensor:
    """[V, H] a head that nobody trained, as one left out of a checkpoint is initialised."""
    head = torch.empty_like(tables.head, dtype=torch.float32)
    nn.init.normal_(head, std=INITIAL_STD, generator=generator_of(seed, WEIGHTS, 1))
    return head


def export_zlab(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], *, dtype: torch.dtype) -> None:
    """Write config.json and model.safetensors: the weights first, so that a directory with a config is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None) for name, tensor in weights.items()}
    write_tensors(directory / WEIGHTS_NAME, tensors, metadata={"format": "pt"})
    write_json(directory / CONFIG_NAME, dict(config) | {"dtype": str(dtype).removeprefix("torch.")})
