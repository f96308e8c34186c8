"""The DeepSpec form: a Hugging Face directory whose class is Qwen3DSparkModel, with an embedding and a head of its own.

Without a Markov head (markov_rank 0) it is plain DFlash whose slots predict one position further: slot k speaks of the
token at anchor + k + 1. Layer ids are z-lab's, and -1 is the embedding's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflash_model.drafter.building import Reading, build, check_geometry
from dflash_model.drafter.claims import Claim, Source, whole_number
from dflash_model.drafter.families import architecture_of, refuse_foreign_keys
from dflash_model.drafter.geometry import read_geometry
from dflash_model.drafter.parts import EMBEDDING, HEAD, Shapes
from dflash_model.drafter.settings import Taps, read_settings
from dflash_model.drafter.zlab import CONFIG_NAME, require
from dflash_model.errors import CheckpointError, ConfigError

ARCHITECTURE = "Qwen3DSparkModel"
_TAPS = Taps(lowest=-1)
_REQUIRED = {
    "block_size": ("block_size", "block_size"),
    "mask_token_id": ("mask_token_id", "mask_token_id"),
    "tap_indices": ("target_layer_ids", "target_layer_ids"),
    "rope_theta": ("rope_theta", "rope_parameters.rope_theta or rope_theta"),
    "rms_norm_eps": ("rms_norm_eps", "rms_norm_eps"),
}


def is_deepspec(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names DeepSpec's class."""
    return ARCHITECTURE in (config.get("architectures") or ())


def read_deepspec(config: Mapping[str, Any], shapes: Shapes) -> Reading:
    """A DeepSpec drafter with this config.json and these tensors (name -> shape), in the neutral form.

    Raises ConfigError for a Markov or confidence head and for a missing, wrong or conflicting key; CheckpointError for
    tensors that do not fit.
    """
    source = Source(label=CONFIG_NAME, values=config)
    architecture_of(source, known=(ARCHITECTURE,))
    _refuse_heads(source)
    refuse_foreign_keys(source)
    geometry = read_geometry(shapes)
    for tensor, rows in ((EMBEDDING, geometry.parts.embedding_rows), (HEAD, geometry.parts.head_rows)):
        if rows is None:
            raise CheckpointError(
                f"The file has no tensor {tensor}, which every DeepSpec drafter has.", "Check that the checkpoint is whole."
            )
    provenance = check_geometry(geometry, source)
    settings = read_settings([source], geometry, taps=_TAPS)
    require(settings, _REQUIRED)
    if settings.shift is not None and settings.shift.value != 1:
        raise ConfigError(
            f"{settings.shift.place} says that slot 0 is dropped, but {ARCHITECTURE} is trained to predict from it.",
            "Remove the key.",
        )
    shift = settings.shift or Claim(value=1, place=f"{CONFIG_NAME} architectures ({ARCHITECTURE}: slot 0 predicts)")
    return build(
        geometry,
        replace(settings, shift=shift),
        source_format="deepspec",
        provenance=provenance,
        taps=_TAPS,
        special_tokens=source,
    )


def _refuse_heads(source: Source) -> None:
    """markov_rank and enable_confidence_head must be there and off: DeepSpec writes both always."""
    ranks = source.top("markov_rank")
    if not ranks:
        raise ConfigError(
            f"{CONFIG_NAME} gives no markov_rank, so nothing tells whether a Markov head belongs to this drafter.",
            "Take the config.json that DeepSpec wrote; it has the key always.",
        )
    if whole_number(ranks[0]):
        raise ConfigError(
            f"{ranks[0].place} is {ranks[0].value}: this is a DSpark drafter, whose Markov head is not supported.",
            "Only DeepSpec drafters with markov_rank 0 can be evaluated; use DeepSpec's own evaluation for this one.",
        )
