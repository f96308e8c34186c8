"""Families: what shows that a checkpoint is not a plain DFlash drafter. Such a file is named and refused, never half run.

A tensor or key that this program does not apply changes the drafter's tokens, so "mostly the same names" is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dflash_model.drafter.claims import Claim, Source, wrong
from dflash_model.errors import CheckpointError, ConfigError

_PLAIN = re.compile(
    r"(fc|hidden_norm|norm)\.weight"
    r"|layers\.\d+\.(input_layernorm|post_attention_layernorm|mlp\.(gate|up|down)_proj)\.weight"
    r"|layers\.\d+\.self_attn\.([qk]_norm\.weight|[qkvo]_proj\.(weight|bias))"
)
_FIX = "Only plain DFlash drafters can be evaluated; use the engine or trainer of that family for this one."

_FOREIGN_TENSORS: tuple[tuple[str, str], ...] = (
    (r"(^|\.)(attention_conv|mlp_conv|candidate_selector)\.", "a DFlash2 drafter (convolutions and candidate selector)"),
    (r"(^|\.)(markov_head|confidence_head)\.", "a DSpark drafter (Markov or confidence head)"),
    (r"(^|\.)(prefix_gru|embed_proj)\.", "a Domino drafter (GRU prefix head)"),
    (r"(^|\.)midlayer\.", "an EAGLE drafter"),
    (r"(^|\.)(t2d|d2t)$", "a speculators drafter with a reduced vocabulary"),
    (r"(^|\.)mask_embedding", "a drafter with a mask embedding of its own"),
    (r"(^|\.)(qkv_proj|g_proj)\.|aux_hidden_norms", "a Laguna-style drafter (fused or gated attention)"),
    (r"sink", "a drafter with attention sinks"),
    (r"^(embed_tokens|lm_head)\.", "a drafter with its own embedding or head (speculators or DeepSpec form)"),
    (r"^(model|module|_orig_mod|draft_model)\.", "a file whose tensor names carry a wrapper's prefix"),
)

_ARCHITECTURES = {
    "DFlash2DraftModel": "DFlash2",
    "Qwen3DSparkModel": "DSpark (DeepSpec form, whose labels are shifted by one)",
    "DSparkDraftModel": "DSpark",
    "DSparkSpeculator": "DSpark",
    "DFlashSpeculator": "speculators DFlash",
}

_FOREIGN_KEYS = {
    "conv_kernel_size": "DFlash2",
    "conv_group_size": "DFlash2",
    "selector_rank": "DFlash2",
    "selector_top_k": "DFlash2",
    "markov_rank": "DSpark",
    "enable_confidence_head": "DSpark",
    "gru_hidden_dim": "Domino",
}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "input_embedding_scale": (1,),
    "output_multiplier": (1,),
    "final_logit_softcapping": (0,),
    "attention_value_scale": (1,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "is_neox_style": (True,),
    "mlp_bias": (False,),
}
"""Keys that change the arithmetic, and the values that do not."""


def refuse_foreign_tensors(names: Iterable[str]) -> None:
    """Raise CheckpointError naming the family where a tensor name is not plain DFlash's."""
    foreign = sorted(name for name in names if not _PLAIN.fullmatch(name))
    for pattern, family in _FOREIGN_TENSORS:
        for name in foreign:
            if re.search(pattern, name):
                raise CheckpointError(f"This is {family}: the file holds {name}.", _FIX)
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise CheckpointError(f"A plain DFlash drafter has no tensor {', '.join(foreign[:5])}{more}.", _FIX)


def refuse_foreign_config(source: Source) -> None:
    """Raise ConfigError naming the family, or the key, where the config is not plain DFlash's."""
    for key in ("speculators_model_type", "speculators_config", "transformer_layer_config"):
        if source.values.get(key) is not None:
            kind = source.values.get("speculators_model_type", "unnamed")
            raise ConfigError(f"{source.label} holds {key}: this is a speculators config (model type {kind}).", _FIX)
    for claim in source.top("architectures"):
        _refuse_architectures(claim)
    for claim in source.claims("projector_type"):
        if claim.value != "dflash":
            raise ConfigError(f"{claim.place} is {claim.value!r}: this is a drafter of another family.", _FIX)
    for key, family in _FOREIGN_KEYS.items():
        for claim in source.claims(key):
            if claim.value:
                raise ConfigError(f"{claim.place} is {claim.value!r}: this is a {family} drafter.", _FIX)
    for key, neutral in _NEUTRAL.items():
        for claim in source.claims(key):
            if claim.value not in neutral:
                raise ConfigError(f"{claim.place} is {claim.value!r}; only {neutral[0]!r} is supported.", _FIX)


def _refuse_architectures(claim: Claim[object]) -> None:
    if not isinstance(claim.value, list | tuple) or not all(isinstance(name, str) for name in claim.value):
        raise wrong(claim, "a list of class names")
    for name in claim.value:
        if name != "DFlashDraftModel":
            family = _ARCHITECTURES.get(name, "EAGLE" if "eagle" in name.lower() else "an unknown family")
            raise ConfigError(f"{claim.place} names {name}: this is not a plain DFlash drafter but {family}.", _FIX)
