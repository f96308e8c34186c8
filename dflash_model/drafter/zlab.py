"""The z-lab form of a drafter: a Hugging Face config.json with dflash_config, and 3 + 11 L tensors.

Keys moved over time (block_size into dflash_config, rope_theta into rope_parameters); both places are read, and must
agree. Nothing is derived: a guessed tap or mask id loads without an error and drafts badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_model.drafter.claims import NESTED, Source
from dflash_model.drafter.families import refuse_foreign_config
from dflash_model.drafter.geometry import Shapes, read_geometry
from dflash_model.drafter.settings import Settings, build_spec, check_geometry, read_settings
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

_READ = {"block_size", "mask_token_id", "target_layer_ids", "causal", "use_swa", "swa_window_size"}
_READ |= {"sample_from_anchor", "query_zero_predicts_next", "shift_label", "num_target_layers", "vocab_size", "rms_norm_eps"}


def spec_from_zlab(config: Mapping[str, Any], shapes: Shapes) -> DrafterSpec:
    """The neutral spec of a z-lab drafter with this config.json and these tensors (name -> shape).

    Raises ConfigError for a missing, wrong or conflicting key, and CheckpointError for tensors of another family or of
    shapes that do not fit; both name what they met.
    """
    source = Source(label=CONFIG_NAME, values=config)
    refuse_foreign_config(source)
    geometry = read_geometry(shapes)
    provenance = check_geometry(geometry, source)
    settings = read_settings([source], num_layers=geometry.num_layers)
    _require(settings)
    unread = sorted(f"{NESTED}.{key}" for key in source.nested.keys() - _READ)
    if unread:
        provenance["unread"] = ", ".join(unread)
    return build_spec(geometry, settings, source_format="zlab", provenance=provenance)


def _require(settings: Settings) -> None:
    for name, (key, places) in _REQUIRED.items():
        if getattr(settings, name) is None:
            raise ConfigError(
                f"{CONFIG_NAME} gives no {key} (looked for {places}).",
                f"Write the {key} that the drafter was trained with; it is never guessed.",
            )
