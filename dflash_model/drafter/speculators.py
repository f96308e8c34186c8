"""The speculators form: a config.json with transformer_layer_config, layer ids that are tuple indices, windows from the anchor.

A sliding layer there sees context positions p >= a - w whatever the slot, as speculators trains it; vLLM serves such a
drafter with a window of its own for each query. Versions to 0.8 carry copies of embedding and head, 0.9 only a reduced head
with its map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflash_model.drafter.building import Reading, build, check_geometry
from dflash_model.drafter.claims import Claim, Source, flag, positive_whole, read, wrong
from dflash_model.drafter.families import refuse_foreign_keys
from dflash_model.drafter.geometry import Geometry, read_geometry
from dflash_model.drafter.parts import Shapes
from dflash_model.drafter.policies import FULL, SLIDING, LayerMasks, read_layer_types
from dflash_model.drafter.settings import Taps, read_settings
from dflash_model.drafter.spec import MaskPolicy
from dflash_model.drafter.zlab import CONFIG_NAME, require
from dflash_model.errors import ConfigError

MODEL_TYPE, LAYERS = "speculators_model_type", "transformer_layer_config"
_TAPS = Taps(key="aux_hidden_state_layer_ids", offset=0)
_FAMILIES = {"dflash": False, "dflash2": True}
"""Model type -> whether its sliding layers see the whole block where the config does not say."""

_FOREIGN = {
    "dspark": "DSpark: its Markov and confidence heads are not supported",
    "xpress": "XPress: its refining head is not supported",
    "eagle3": "EAGLE-3: it drafts token by token from its own states",
    "peagle": "P-EAGLE: it drafts from its own states",
    "mtp": "an MTP head: it drafts token by token from its own states",
}
_MASK_KEYS = ("layer_types", "use_sliding_window", "sliding_window", "sliding_window_non_causal")
_READ_KEYS = {
    "architectures", "auto_map", "aux_hidden_state_layer_ids", "block_size", "conv_group_size", "conv_kernel_size", "draft_vocab_size",
    "dtype", "mask_token_id", "sample_from_anchor", "selector_rank", "selector_top_k", "sliding_window_non_causal",
    "speculators_config", "speculators_model_type", "speculators_version", "target_hidden_size", "tie_word_embeddings",
    "torch_dtype", "transformer_layer_config", "transformers_version", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping",
}  # fmt: skip
_REQUIRED = {
    "block_size": ("block_size", "block_size"),
    "mask_token_id": ("mask_token_id", "mask_token_id"),
    "tap_indices": ("aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
    "rope_theta": ("rope_theta", f"{LAYERS}.rope_parameters.rope_theta or {LAYERS}.rope_theta"),
    "rms_norm_eps": ("rms_norm_eps", f"{LAYERS}.rms_norm_eps"),
}


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is in speculators' form."""
    return any(config.get(key) is not None for key in (MODEL_TYPE, "speculators_config", LAYERS))


def read_speculators(config: Mapping[str, Any], shapes: Shapes) -> Reading:
    """A speculators drafter with this config.json and these tensors (name -> shape), in the neutral form.

    Raises ConfigError for another family and for a missing, wrong or conflicting key; CheckpointError for tensors that do
    not fit.
    """
    whole = Source(label=CONFIG_NAME, values=config)
    family = _family(whole)
    inner = _layers(whole)
    outer = Source(label=CONFIG_NAME, values={key: value for key, value in config.items() if key not in (LAYERS, *_MASK_KEYS)})
    for source in (outer, inner):
        refuse_foreign_keys(source)
    geometry = read_geometry(shapes)
    provenance = check_geometry(geometry, inner)
    _check_hidden_size(outer, geometry)
    plain = Source(label=inner.label, values={key: value for key, value in inner.values.items() if key not in _MASK_KEYS})
    settings = read_settings([outer, plain], geometry, taps=_TAPS)
    require(settings, _REQUIRED)
    settings = replace(
        settings,
        layer_masks=_masks(whole, inner, geometry.num_layers, family=family.value),
        shift=settings.shift or Claim(value=0, place="not stated: speculators' default, slot 0 is dropped"),
    )
    unread = sorted(set(config) - _READ_KEYS)
    if unread:
        provenance["unread"] = ", ".join(unread)
    reading = build(
        geometry,
        settings,
        source_format="speculators",
        provenance=provenance,
        taps=_TAPS,
        architecture=Claim(value={"dflash": "DFlash", "dflash2": "DFlash2"}[family.value], place=family.place),
        special_tokens=inner,
    )
    return replace(reading, warnings=(*reading.warnings, *_proposal_warnings(whole, reading.spec.drafted_tokens)))


def _family(source: Source) -> Claim[str]:
    claims = source.top(MODEL_TYPE)
    if not claims:
        raise ConfigError(
            f"{CONFIG_NAME} is in speculators' form but gives no {MODEL_TYPE}.", f'Write "{MODEL_TYPE}": "dflash" or "dflash2".'
        )
    (claim,) = claims
    if claim.value not in _FAMILIES:
        what = _FOREIGN.get(claim.value, "an unknown family") if isinstance(claim.value, str) else "no text"
        raise ConfigError(
            f"{claim.place} is {claim.value!r}, which is {what}.",
            "Only dflash and dflash2 can be evaluated; use speculators or vLLM for this one.",
        )
    return Claim(value=str(claim.value), place=claim.place)


def _layers(source: Source) -> Source:
    """The transformer_layer_config, with a rotation per layer type brought to the one that speculators applies."""
    claims = source.top(LAYERS)
    if not claims:
        raise ConfigError(f"{CONFIG_NAME} gives no {LAYERS}.", "Take the config.json that speculators wrote.")
    (claim,) = claims
    if not isinstance(claim.value, Mapping):
        raise wrong(claim, "an object")
    values = dict(claim.value)
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping) and isinstance(rope.get(SLIDING), Mapping):
        values["rope_parameters"] = rope[SLIDING]
    return Source(label=f"{claim.place}.", values=values)


def _check_hidden_size(source: Source, geometry: Geometry) -> None:
    for claim in source.top("target_hidden_size"):
        if positive_whole(claim) != geometry.hidden_size:
            raise ConfigError(
                f"{claim.place} is {claim.value}, but the drafter's hidden size is {geometry.hidden_size}.",
                "A drafter of another width than its target is not supported; the target's embedding and head would not fit.",
            )


def _masks(whole: Source, inner: Source, num_layers: int, *, family: str) -> Claim[LayerMasks]:
    types = read_layer_types(inner, num_layers)
    if SLIDING not in types.value:
        return Claim(value=(MaskPolicy(in_block="bidirectional"),) * num_layers, place=types.place)
    switch = read("use_sliding_window", inner.top("use_sliding_window"), flag)
    window = read("window", inner.top("sliding_window"), positive_whole)
    if switch is not None and not switch.value and window is not None:
        raise ConfigError(
            f"{types.place} names {SLIDING} and {window.place} is {window.value}, but {switch.place} is false.",
            f"Write true if the drafter was trained with the window, else call the layers {FULL}.",
        )
    if window is None:
        return Claim(
            value=(MaskPolicy(in_block="bidirectional"),) * num_layers,
            place=f"{types.place} (no sliding_window)",
            warning=f"{types.place} names {SLIDING} without a sliding_window: speculators then trains full attention, and so it is read.",
        )
    free = read("sliding_window_non_causal", whole.top("sliding_window_non_causal"), flag)
    non_causal = free.value if free else _FAMILIES[family]
    slides = MaskPolicy(in_block="bidirectional" if non_causal else "causal", window=window.value, window_origin="anchor")
    masks = tuple(slides if kind == SLIDING else MaskPolicy(in_block="bidirectional") for kind in types.value)
    causality = free.place if free else f"speculators' default for {family}"
    return Claim(value=masks, place=f"{types.place}, {window.place} (from the anchor), {causality}")


def _proposal_warnings(source: Source, drafted_tokens: int) -> list[str]:
    """A warning where the config asks for more tokens than a block drafts, as early exports did."""
    inner = source.values.get("speculators_config")
    methods = inner.get("proposal_methods") if isinstance(inner, Mapping) else None
    asked = [method.get("speculative_tokens") for method in methods or () if isinstance(method, Mapping)]
    return [
        f"{CONFIG_NAME} speculators_config asks for {number} speculative tokens, but a block drafts {drafted_tokens}; "
        f"{drafted_tokens} are judged."
        for number in asked
        if isinstance(number, int) and number > drafted_tokens
    ]
