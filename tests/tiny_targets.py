"""Tiny random targets of several families, and the demo's trained one, for tests of the target's side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

DEMO_TARGET = Path(__file__).parent.parent / "deployments" / "demo" / "target"
DEMO_PROMPTS = DEMO_TARGET.parent / "prompts.jsonl"

_SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
_LINEAR = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "qwen3_next": {**_LINEAR, **_EXPERTS},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 0.5, "query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
}


def tiny_model(kind: str, **changes: Any) -> Any:
    """A seeded random causal language model whose norm weights are far from neutral; float32, eval mode."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(_SMALL | CONFIGS[kind] | changes))
    auto: Any = transformers.AutoModelForCausalLM
    return randomise(auto.from_config(config, dtype=torch.float32))


def tiny_multimodal_model() -> Any:
    """A seeded random Qwen3.5 with a vision tower, as its checkpoints are published."""
    torch.manual_seed(0)
    text = transformers.AutoConfig.for_model("qwen3_5_text", **(_SMALL | _LINEAR))
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 1,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    config = transformers.AutoConfig.for_model(
        "qwen3_5", text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False,
        image_token_id=30, video_token_id=31, vision_start_token_id=32, vision_end_token_id=33,
    )  # fmt: skip
    auto: Any = transformers.AutoModelForImageTextToText
    return randomise(auto.from_config(config, dtype=torch.float32))


def randomise(model: Any) -> Any:
    """Spread the matrices, and move norm weights away from where plain and one-plus forms agree."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.3, 1.7)
            elif parameter.ndim >= 2:
                parameter.normal_(std=0.2)
    return model.eval()
