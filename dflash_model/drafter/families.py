"""Families: what shows that a checkpoint is neither DFlash nor DFlash2. Such a file is named and refused, never half run.

A tensor or key that this program does not apply changes the drafter's tokens, so "mostly the same names" is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from dflash_model.drafter.claims import Claim, Source, wrong
from dflash_model.errors import CheckpointError, ConfigError

_KNOWN = re.compile(
    r"(fc|hidden_norm|norm|embed_tokens|lm_head)\.weight|d2t|mask_embedding"
    r"|layers\.\d+\.(input_layernorm|post_attention_layernorm|mlp\.(gate|up|down)_proj)\.weight"
    r"|layers\.\d+\.self_attn\.([qk]_norm\.weight|[qkvo]_proj\.(weight|bias))"
    r"|layers\.\d+\.(attention_conv|mlp_conv)\.(base_kernel|kernel_projection\.weight)"
    r"|candidate_selector\.(predecessor_codebook|successor_codebook|hidden_projection\.weight)"
)
_FIX = "Only DFlash and DFlash2 drafters can be evaluated; use the engine or trainer of that family for this one."

_FOREIGN_TENSORS: tuple[tuple[str, str], ...] = (
    (r"(^|\.)(markov_head|confidence_head)\.", "a DSpark drafter (Markov or confidence head)"),
    (r"(^|\.)(prefix_gru|embed_proj)\.", "a Domino drafter (GRU prefix head)"),
    (r"(^|\.)xpress_head\.", "an XPress drafter (refining head)"),
    (r"(^|\.)midlayer\.|(^|\.)(fc_norm|input_norm)\.", "an EAGLE drafter"),
    (r"(^|\.)(mtp|eh_proj|enorm|hnorm|shared_head|pre_fc_norm_embedding|pre_fc_norm_hidden)(\.|$)", "an MTP head"),
    (r"(^|\.)(qkv_proj|g_proj)\.|aux_hidden_norms", "a Laguna-style drafter (fused or gated attention)"),
    (r"sink", "a drafter with attention sinks"),
    (r"^(model|module|_orig_mod|draft_model)\.", "a file whose tensor names carry a wrapper's prefix"),
)

_ARCHITECTURES = {
    "Qwen3DSparkModel": "DeepSpec's form",
    "Gemma4DSparkModel": "DeepSpec's form for Gemma (other norms and layers)",
    "DSparkDraftModel": "DSpark",
    "DSparkSpeculator": "DSpark",
    "DFlashSpeculator": "speculators' form of DFlash",
    "Qwen3XPressModel": "XPress",
    "DominoDraftModel": "Domino",
}

_FOREIGN_KEYS = {
    "markov_rank": "DSpark",
    "enable_confidence_head": "DSpark",
    "gru_hidden_dim": "Domino",
}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_value_scale": (1,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "mlp_bias": (False,),
}
"""Keys that change the arithmetic, and the values that do not."""


def refuse_foreign_tensors(names: Iterable[str]) -> None:
    """Raise CheckpointError naming the family where a tensor name is neither DFlash's nor DFlash2's."""
    foreign = sorted(name for name in names if not _KNOWN.fullmatch(name))
    for pattern, family in _FOREIGN_TENSORS:
        for name in foreign:
            if re.search(pattern, name):
                raise CheckpointError(f"This is {family}: the file holds {name}.", _FIX)
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise CheckpointError(f"A DFlash drafter has no tensor {', '.join(foreign[:5])}{more}.", _FIX)


def refuse_foreign_config(source: Source) -> None:
    """Raise ConfigError naming the family, or the key, where the config is not that of DFlash or DFlash2 in z-lab's keys."""
    for key in ("speculators_model_type", "speculators_config", "transformer_layer_config"):
        if source.values.get(key) is not None:
            kind = source.values.get("speculators_model_type", "unnamed")
            raise ConfigError(
                f"{source.label} holds {key}: this is a speculators config (model type {kind}).",
                "Give a config in z-lab's form here; a directory with such a config is read as it is.",
            )
    architecture_of(source)
    for claim in source.claims("projector_type"):
        if claim.value != "dflash":
            raise ConfigError(f"{claim.place} is {claim.value!r}: this is a drafter of another family.", _FIX)
    refuse_foreign_keys(source)


def refuse_foreign_keys(source: Source) -> None:
    """Raise ConfigError for a key of another family, or one that changes the arithmetic in a way that is not supported."""
    for key, family in _FOREIGN_KEYS.items():
        for claim in source.claims(key):
            if claim.value:
                raise ConfigError(f"{claim.place} is {claim.value!r}: this is a {family} drafter.", _FIX)
    for key, neutral in _NEUTRAL.items():
        for claim in source.claims(key):
            if claim.value not in neutral:
                raise ConfigError(f"{claim.place} is {claim.value!r}; only {neutral[0]!r} is supported.", _FIX)


def architecture_of(source: Source, *, known: Iterable[str] = ("DFlashDraftModel", "DFlash2DraftModel")) -> Claim[str] | None:
    """The one class that `source` names; None where it names none. Raises ConfigError for one that is not `known`."""
    claims = source.top("architectures")
    if not claims:
        return None
    (claim,) = claims
    if not isinstance(claim.value, list | tuple) or not all(isinstance(name, str) for name in claim.value):
        raise wrong(claim, "a list of class names")
    for name in claim.value:
        if name not in known:
            family = _ARCHITECTURES.get(name, "EAGLE" if "eagle" in name.lower() else "an unknown family")
            raise ConfigError(f"{claim.place} names {name}: this is not a DFlash drafter in z-lab's form but {family}.", _FIX)
    if len(set(claim.value)) != 1:
        raise wrong(claim, "a list of one class name")
    return Claim(value=claim.value[0], place=claim.place)
