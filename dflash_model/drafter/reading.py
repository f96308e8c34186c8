"""Reading: which form a checkpoint has, and its reader. The one way from tensors to a DrafterSpec, for stages and `describe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_model.checkpoint.extract import ExtractPlan
from dflash_model.checkpoint.safetensors_file import SINGLE_NAME
from dflash_model.checkpoint.table import TensorTable
from dflash_model.checkpoint.tensor_names import TARGETS_TABLE
from dflash_model.checkpoint.vocabulary_map import check_map, read_map
from dflash_model.drafter.bare import read_bare
from dflash_model.drafter.building import Reading
from dflash_model.drafter.deepspec import is_deepspec, read_deepspec
from dflash_model.drafter.parts import MASK_EMBEDDING, VOCABULARY_MAP, Shapes
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.speculators import is_speculators, read_speculators
from dflash_model.drafter.zlab import read_zlab
from dflash_model.errors import CheckpointError


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensors:
    """The drafter's tensors under their clean names; no data but the vocabulary map's is ever read."""

    shapes: Shapes
    """Name -> shape."""

    read_map: Callable[[], NDArray[np.int64]]
    """d2t's values; only called where it is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenConfig:
    """What a user says about a checkpoint without a config of its own."""

    config: Mapping[str, Any] | None = None
    """A config.json in z-lab's form."""

    config_from: DrafterSpec | None = None
    """A drafter of the same sizes that fills what nobody states."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """mask_token_id, target_layer_ids, block_size, rope_theta, rms_norm_eps."""


def tensors_of(table: TensorTable[Any]) -> Tensors:
    """Those of a file that was extracted."""
    entries = {path[0]: entry for path, entry in table.by_path().items()}
    return _tensors(table, entries)


def tensors_of_plan(plan: ExtractPlan) -> Tensors:
    """Those that an extraction would write."""
    return _tensors(plan.table, dict(plan.state.tensors))


def _tensors(table: TensorTable[Any], entries: dict[str, Any]) -> Tensors:
    shapes = {name: entry.shape for name, entry in entries.items()}
    return Tensors(shapes=shapes, read_map=lambda: read_map(table, entries[VOCABULARY_MAP]))


def read_directory(tensors: Tensors, config: Mapping[str, Any], *, beside: Sequence[str] = ()) -> Reading:
    """A drafter directory with this config.json; `beside` names its files. Raises ConfigError or CheckpointError."""
    _refuse_side_files(beside)
    read = read_speculators if is_speculators(config) else read_deepspec if is_deepspec(config) else read_zlab
    return _with_checked_map(tensors, read(config, tensors.shapes))


def read_training_file(tensors: Tensors, facts: Mapping[str, Any], dropped: Mapping[str, str], given: GivenConfig) -> Reading:
    """A training file with these `facts` beside its tensors; `dropped` says what was left out of it (name -> why).

    Raises ConfigError or CheckpointError.
    """
    saved = facts.get("args", facts.get("config"))
    reading = read_bare(
        tensors.shapes,
        saved_args=saved if isinstance(saved, dict) else None,
        config=given.config,
        config_from=given.config_from,
        **given.options,
    )
    tables = sorted(name for name, why in dropped.items() if why == TARGETS_TABLE)
    if tables:
        left = f"{' and '.join(tables)} of the training file are taken for the target's frozen copies and left behind."
        reading = replace(reading, warnings=(*reading.warnings, left))
    return _with_checked_map(tensors, reading)


def _refuse_side_files(names: Sequence[str]) -> None:
    """A mask embedding in a file of its own would be passed over; without it the drafter is another one."""
    for name in names:
        if name.startswith(MASK_EMBEDDING):
            raise CheckpointError(
                f"{name} lies beside the weights and is not read.",
                f"Save it as the tensor {MASK_EMBEDDING} in {SINGLE_NAME}, or remove the file if the drafter does not use it.",
            )


def _with_checked_map(tensors: Tensors, reading: Reading) -> Reading:
    if VOCABULARY_MAP in tensors.shapes:
        check_map(tensors.read_map(), None, vocab_size=reading.spec.vocab_size)
    return reading
