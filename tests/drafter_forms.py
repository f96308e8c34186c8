"""Configs and shapes of every published drafter form, all of the small drafter in tests/tiny_drafters.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dflash_model.drafter.geometry import Geometry
from dflash_model.drafter.parts import Parts
from tests.tiny_drafters import GEOMETRY

VOCABULARY, DRAFT_VOCABULARY = 50, 20
DFLASH2_PARTS = Parts(conv_kernel_size=2, conv_group_size=8, selector_rank=4, selector_rows=VOCABULARY)
DFLASH2_KEYS = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}


def geometry_with(**parts: Any) -> Geometry:
    """GEOMETRY with these parts."""
    return replace(GEOMETRY, parts=replace(Parts(), **parts))


DFLASH2 = replace(GEOMETRY, parts=DFLASH2_PARTS)
OWN_TABLES = geometry_with(embedding_rows=VOCABULARY, head_rows=VOCABULARY)
REDUCED = geometry_with(head_rows=DRAFT_VOCABULARY, map_rows=DRAFT_VOCABULARY)


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with these changes; `...` removes a key, a dict changes what is below it."""
    merged = dict(values)
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = changed(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return {key: value for key, value in merged.items() if value is not ...}


def speculators_config(**changes: Any) -> dict[str, Any]:
    """As speculators 0.9.0 saves it."""
    layers: dict[str, Any] = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": None, "head_dim": 8, "hidden_act": "silu",
        "hidden_size": 24, "initializer_range": 0.02, "intermediate_size": 40, "layer_types": ["full_attention", "full_attention"],
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 6,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "pad_token_id": None, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "sliding_window": None, "tie_word_embeddings": False,
        "use_cache": True, "use_sliding_window": False, "vocab_size": VOCABULARY,
    }  # fmt: skip
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "auto_map": {"": "config.DFlashSpeculatorConfig"}, "aux_hidden_state_layer_ids": [2, 4, 5],
        "block_size": 5, "draft_vocab_size": VOCABULARY, "dtype": "float32", "mask_token_id": 3, "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash", "default_proposal_method": "greedy", "proposal_methods": [method],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": None},
        },
        "speculators_model_type": "dflash", "speculators_version": "0.9.0", "target_hidden_size": None, "tie_word_embeddings": False,
        "transformer_layer_config": layers, "transformers_version": "5.19.0",
    }  # fmt: skip
    return changed(config, changes)


def sliding(window: int = 7, **changes: Any) -> dict[str, Any]:
    """Changes that make the first of two layers slide, in a transformer_layer_config or z-lab's config."""
    return {
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": window,
    } | changes


def deepspec_config(**changes: Any) -> dict[str, Any]:
    """As DeepSpec saves its own "DFlash" (no Markov head, no confidence head)."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "attention_bias": False, "block_size": 5, "bos_token_id": 1,
        "enable_confidence_head": False, "eos_token_id": 2, "head_dim": 8, "hidden_act": "silu", "hidden_size": 24, "intermediate_size": 40,
        "layer_types": ["full_attention", "full_attention"], "markov_rank": 0, "mask_token_id": 3, "num_anchors": 512,
        "num_attention_heads": 6, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_target_layers": 6, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "sliding_window": None, "target_layer_ids": [1, 3, 4],
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": VOCABULARY,
    }  # fmt: skip
    return changed(config, changes)
