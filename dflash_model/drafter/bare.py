"""A bare state dict: weights without a config. Shapes give the sizes; everything else must be stated by someone.

Order: explicit options, then a given config (z-lab form), then the trainer's saved args, then a reference drafter of
the same sizes. The first three speak about this very checkpoint, so they must agree where they overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from dflash_model.drafter.claims import Claim, Source
from dflash_model.drafter.families import refuse_foreign_config
from dflash_model.drafter.geometry import Geometry, Shapes, read_geometry
from dflash_model.drafter.settings import Settings, build_spec, check_geometry, read_settings
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.zlab import CONFIG_NAME
from dflash_model.errors import ConfigError

SAVED_ARGS = "the trainer's saved args"
REFERENCE = "the reference drafter's spec"

_OPTION = {
    "mask_token_id": "--mask-token-id",
    "tap_indices": "--target-layer-ids",
    "block_size": "--block-size",
    "rope_theta": "--rope-theta",
    "rms_norm_eps": "--rms-norm-eps",
}


def spec_from_bare(
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
) -> DrafterSpec:
    """The neutral spec of a state dict with these tensors (name -> shape).

    `config_from` fills what nobody states, after every size has been compared. Layer masks that nobody states are full
    attention, bidirectional in the block; the provenance says so. Raises ConfigError for conflicts (both quoted), for a
    reference of other sizes (each listed) and, once for all of them, for settings that nobody states.
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
    settings = read_settings(stated, num_layers=geometry.num_layers, options=options)
    if config is not None:
        settings = settings.or_from(Settings.unstated(num_layers=geometry.num_layers))
    if config_from is not None:
        _compare(geometry, config_from)
        settings = settings.or_from(_settings_of(config_from))
    _require(settings)
    return build_spec(geometry, settings, source_format="bare", provenance=provenance)


def _compare(geometry: Geometry, reference: DrafterSpec) -> None:
    differing = [
        f"{f.name} {getattr(geometry, f.name)!r} here, {getattr(reference, f.name)!r} there"
        for f in fields(geometry)
        if getattr(geometry, f.name) != getattr(reference, f.name)
    ]
    if differing:
        raise ConfigError(
            f"The weights do not have the reference drafter's sizes: {'; '.join(differing)}.",
            "Give --config, or a --config-from drafter of the same sizes.",
        )


def _settings_of(spec: DrafterSpec) -> Settings:
    def claim(value: Any) -> Any:
        return None if value is None else Claim(value=value, place=REFERENCE)

    stated = {f.name: claim(getattr(spec, f.name)) for f in fields(Settings) if f.name != "rope_theta"}
    return Settings(**stated, rope_theta=claim(spec.rope.theta))


def _require(settings: Settings) -> None:
    missing = [option for name, option in _OPTION.items() if getattr(settings, name) is None]
    if missing:
        raise ConfigError(
            f"The checkpoint holds weights only, and nothing states {len(missing)} of the settings that decide its tokens.",
            f"Give {', '.join(missing)}; or --config with its config.json, or --config-from with a drafter of the same kind.",
        )
