"""Export: a spec written as the config.json of a public form, so that its own reader reads it back to the same spec.

What a form has no keys for is refused by name: a config that means something else would be worse than none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dflash_model.drafter.claims import NESTED
from dflash_model.drafter.parts import CODEBOOKS
from dflash_model.drafter.policies import FULL, SLIDING
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.errors import ConfigError

_CLASSES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
_NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def zlab_config(spec: DrafterSpec) -> dict[str, Any]:
    """The config.json in z-lab's form. Raises ConfigError for a window from the anchor, mixed masks, or a tap of the embedding."""
    if spec.tap_indices[0] == 0:
        raise _inexpressible("a tap of the embedding's output", "z-lab's")
    nested: dict[str, Any] = {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": bool(spec.shift),
        "target_layer_ids": [index - 1 for index in spec.tap_indices],
    }
    return (
        {"architectures": [_CLASSES[spec.family]], "model_type": "qwen3"}
        | _sizes(spec)
        | _zlab_masks(spec)
        | {NESTED: nested | _extras(spec)}
        | ({"num_target_layers": spec.num_target_layers} if spec.num_target_layers is not None else {})
    )


def speculators_config(spec: DrafterSpec) -> dict[str, Any]:
    """The config.json in speculators' form. Raises ConfigError for a window of each query, or masks that it cannot say."""
    masks, non_causal = _speculators_masks(spec)
    layers = {"model_type": "qwen3", "tie_word_embeddings": False} | _sizes(spec) | masks
    if spec.num_target_layers is not None:
        layers["num_target_layers"] = spec.num_target_layers
    if spec.vocab_size is None:
        raise _inexpressible("an unknown vocabulary", "speculators'")
    return {
        "architectures": [_CLASSES[spec.family]],
        "aux_hidden_state_layer_ids": list(spec.tap_indices),
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab_size or spec.vocab_size,
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": bool(spec.shift),
        "sliding_window_non_causal": non_causal,
        "speculators_config": {
            "algorithm": spec.family,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.drafted_tokens}],
            "verifier": {"architectures": [], "name_or_path": None},
        },
        "speculators_model_type": spec.family,
        "transformer_layer_config": layers,
    } | {key: value for key, value in _extras(spec).items() if key != "draft_vocab_size"}


def speculators_names(names: Iterable[str]) -> dict[str, str]:
    """Tensor name here -> in a speculators file; DFlash2's codebooks are embeddings there."""
    return {name: f"{name}.weight" if name in CODEBOOKS else name for name in names}


def _sizes(spec: DrafterSpec) -> dict[str, Any]:
    sizes = {
        "attention_bias": spec.attention_bias,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_norm_eps,
    }
    return sizes | _rope(spec.rope, spec.head_dim) | ({"vocab_size": spec.vocab_size} if spec.vocab_size is not None else {})


def _rope(rope: Rope, head_dim: int) -> dict[str, Any]:
    group: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.type}
    group |= {name: bool(value) if name == "truncate" else value for name, value in rope.scaling}
    if rope.sections is not None:
        group["mrope_section"] = list(rope.sections)
    keys: dict[str, Any] = {"rope_parameters": group}
    if rope.dims != head_dim:
        keys["rotary_dim"] = rope.dims
    if rope.interleaved:
        keys["is_neox_style"] = False
    return keys


def _extras(spec: DrafterSpec) -> dict[str, Any]:
    extras = {name: getattr(spec, name) for name, neutral in _NEUTRAL.items() if getattr(spec, name) != neutral}
    if spec.family == "dflash2":
        extras |= {name: getattr(spec, name) for name in _DFLASH2}
    if spec.draft_vocab_size is not None:
        extras["draft_vocab_size"] = spec.draft_vocab_size
    return extras


def _zlab_masks(spec: DrafterSpec) -> dict[str, Any]:
    sliding = [mask for mask in spec.layer_masks if mask.window is not None]
    if any(mask.window_origin != "query" for mask in sliding):
        raise _inexpressible("a window measured from the anchor", "z-lab's")
    if len({mask.window for mask in sliding}) > 1:
        raise _inexpressible("several windows", "z-lab's")
    keys: dict[str, Any] = {"layer_types": [FULL if mask.window is None else SLIDING for mask in spec.layer_masks]}
    if sliding:
        keys |= {"use_sliding_window": True, "sliding_window": sliding[0].window}
    in_block = {(mask.window is not None, mask.in_block) for mask in spec.layer_masks}
    if in_block <= {(False, "bidirectional"), (True, "causal")}:
        return keys
    causality = {kind for _, kind in in_block}
    if len(causality) > 1:
        raise _inexpressible("full layers that are causal beside sliding ones that are not", "z-lab's")
    return keys | {"is_causal": causality == {"causal"}}


def _speculators_masks(spec: DrafterSpec) -> tuple[dict[str, Any], bool]:
    sliding = {mask for mask in spec.layer_masks if mask.window is not None}
    if any(mask.window_origin != "anchor" for mask in sliding):
        raise _inexpressible("a window of each query", "speculators'")
    if len(sliding) > 1:
        raise _inexpressible("several windows", "speculators'")
    if not {mask for mask in spec.layer_masks if mask.window is None} <= {MaskPolicy(in_block="bidirectional")}:
        raise _inexpressible("full layers that are causal", "speculators'")
    keys: dict[str, Any] = {"layer_types": [FULL if mask.window is None else SLIDING for mask in spec.layer_masks]}
    for mask in sliding:
        keys |= {"use_sliding_window": True, "sliding_window": mask.window}
    return keys, any(mask.in_block == "bidirectional" for mask in sliding)


def _inexpressible(what: str, form: str) -> ConfigError:
    return ConfigError(f"The drafter has {what}, which a config in {form} form cannot say.", "Keep its own config.json.")
