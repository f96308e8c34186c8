"""A bare state dict: weights without a config. Shapes give the sizes; everything else must be stated by someone.

Order: explicit options, then a given config (z-lab form), then the trainer's saved args, then a reference drafter of
the same sizes. The first three speak about this very checkpoint, so they must agree where they overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from dflash_model.drafter.building import Reading, build, check_geometry
from dflash_model.drafter.claims import Claim, Source
from dflash_model.drafter.families import architecture_of, refuse_foreign_config
from dflash_model.drafter.geometry import Geometry, read_geometry
from dflash_model.drafter.parts import Shapes
from dflash_model.drafter.rotation import Rotation
from dflash_model.drafter.settings import Settings, read_settings
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.zlab import CONFIG_NAME
from dflash_model.errors import ConfigError

SAVED_ARGS = "the trainer's saved args"
REFERENCE = "the reference drafter's spec"
UNSTATED_MASKS = (
    "Nothing states the attention masks: every layer is taken to see the whole context and the whole block. "
    "Give --config with layer_types and sliding_window if the drafter was trained otherwise."
)
UNSTATED_SHIFT = (
    "Nothing states the slot layout: slot 0 is taken to be dropped, as z-lab trains. "
    "Give --config with sample_from_anchor if slot 0 predicts."
)

_OPTION = {
    "mask_token_id": "--mask-token-id",
    "tap_indices": "--target-layer-ids",
    "block_size": "--block-size",
    "rope_theta": "--rope-theta",
    "rms_norm_eps": "--rms-norm-eps",
}


def read_bare(
    shapes: Shapes,
    *,
    saved_args: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
    mask_token_id: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    rope_theta: float | None = None,
    rms_norm_eps: float | None = None,
    config_from: DrafterSpec | None = None,
) -> Reading:
    """A state dict with these tensors (name -> shape), in the neutral form.

    `config_from` fills what nobody states, after every size has been compared. Layer masks and a slot layout that nobody
    states are plain DFlash's, with a warning. Raises ConfigError for conflicts (both quoted), for a reference of other
    sizes (each listed) and, once for all of them, for settings that nobody states.
    """
    geometry = read_geometry(shapes)
    stated = [Source(label=CONFIG_NAME, values=config)] if config is not None else []
    stated += [Source(label=SAVED_ARGS, values=saved_args)] if saved_args is not None else []
    for source in stated:
        refuse_foreign_config(source)
    provenance = check_geometry(geometry, stated[0] if config is not None else None)
    options = {
        "mask_token_id": mask_token_id,
        "target_layer_ids": target_layer_ids,
        "block_size": block_size,
        "rope_theta": rope_theta,
        "rms_norm_eps": rms_norm_eps,
    }
    settings = read_settings(stated, geometry, options=options)
    if config is not None:
        settings = settings.or_from(Settings.unstated(geometry))
    if config_from is not None:
        _compare(geometry, config_from)
        settings = settings.or_from(_settings_of(config_from))
    _require(settings)
    reading = build(
        geometry,
        settings,
        source_format="bare",
        provenance=provenance,
        architecture=next(filter(None, map(architecture_of, stated)), None),
        special_tokens=stated[0] if stated else None,
    )
    unstated = ((settings.layer_masks, UNSTATED_MASKS), (settings.shift, UNSTATED_SHIFT))
    return replace(reading, warnings=(*reading.warnings, *(sentence for claim, sentence in unstated if claim is None)))


def _compare(geometry: Geometry, reference: DrafterSpec) -> None:
    differing = [
        f"{f.name} {getattr(geometry, f.name)!r} here, {getattr(reference, f.name)!r} there"
        for f in fields(geometry)
        if f.name != "parts" and getattr(geometry, f.name) != getattr(reference, f.name)
    ]
    family = "dflash2" if geometry.parts.is_dflash2 else "dflash"
    if family != reference.family:
        differing.append(f"family {family!r} here, {reference.family!r} there")
    if differing:
        raise ConfigError(
            f"The weights do not have the reference drafter's sizes: {'; '.join(differing)}.",
            "Give --config, or a --config-from drafter of the same sizes.",
        )


def _settings_of(spec: DrafterSpec) -> Settings:
    def claim(value: Any) -> Any:
        return None if value is None else Claim(value=value, place=REFERENCE)

    elsewhere = ("rope_theta", "rotation", "draft_vocab_size")
    stated = {f.name: claim(getattr(spec, f.name)) for f in fields(Settings) if f.name not in elsewhere}
    turn = {f.name: getattr(spec.rope, f.name) for f in fields(Rotation)}
    return Settings(**stated, rope_theta=claim(spec.rope.theta), rotation=claim(Rotation(**turn)), draft_vocab_size=None)


def _require(settings: Settings) -> None:
    missing = [option for name, option in _OPTION.items() if getattr(settings, name) is None]
    if missing:
        raise ConfigError(
            f"The checkpoint holds weights only, and nothing states {len(missing)} of the settings that decide its tokens.",
            f"Give {', '.join(missing)}; or --config with its config.json, or --config-from with a drafter of the same kind.",
        )
