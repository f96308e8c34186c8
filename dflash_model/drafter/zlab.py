"""The z-lab form of a drafter: a Hugging Face config.json with dflash_config, and 3 + 11 L tensors (more for DFlash2).

Keys moved over time (block_size into dflash_config, rope_theta into rope_parameters); both places are read, and must
agree. Nothing is derived: a guessed tap or mask id loads without an error and drafts badly. SpecForge exports the same form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_model.drafter.building import Reading, build, check_geometry
from dflash_model.drafter.claims import NESTED, Source
from dflash_model.drafter.families import architecture_of, refuse_foreign_config
from dflash_model.drafter.geometry import read_geometry
from dflash_model.drafter.parts import Shapes
from dflash_model.drafter.settings import READ_KEYS, Settings, read_settings
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import ConfigError

CONFIG_NAME = "config.json"

_REQUIRED = {
    "block_size": ("block_size", f"{NESTED}.block_size or block_size"),
    "mask_token_id": ("mask_token_id", f"{NESTED}.mask_token_id"),
    "tap_indices": ("target_layer_ids", f"{NESTED}.target_layer_ids"),
    "rope_theta": ("rope_theta", "rope_parameters.rope_theta, rope_scaling.rope_theta or rope_theta"),
    "rms_norm_eps": ("rms_norm_eps", "rms_norm_eps"),
}
"""Setting -> its key, and the places where it may stand."""


def read_zlab(config: Mapping[str, Any], shapes: Shapes) -> Reading:
    """A z-lab drafter with this config.json and these tensors (name -> shape), in the neutral form.

    Raises ConfigError for a missing, wrong or conflicting key, and CheckpointError for tensors of another family or of
    shapes that do not fit; both name what they met.
    """
    source = Source(label=CONFIG_NAME, values=config)
    refuse_foreign_config(source)
    geometry = read_geometry(shapes)
    provenance = check_geometry(geometry, source)
    settings = read_settings([source], geometry)
    require(settings, _REQUIRED)
    unread = sorted(f"{NESTED}.{key}" for key in source.nested.keys() - READ_KEYS)
    if unread:
        provenance["unread"] = ", ".join(unread)
    return build(
        geometry,
        settings,
        source_format="zlab",
        provenance=provenance,
        architecture=architecture_of(source),
        special_tokens=source,
    )


def spec_from_zlab(config: Mapping[str, Any], shapes: Shapes) -> DrafterSpec:
    """The spec that `read_zlab` reads, without its warnings."""
    return read_zlab(config, shapes).spec


def require(settings: Settings, required: Mapping[str, tuple[str, str]]) -> None:
    """Raise ConfigError for the first of the `required` settings (name -> key, places) that nothing states."""
    for name, (key, places) in required.items():
        if getattr(settings, name) is None:
            raise ConfigError(
                f"{CONFIG_NAME} gives no {key} (looked for {places}).",
                f"Write the {key} that the drafter was trained with; it is never guessed.",
            )
