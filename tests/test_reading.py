"""drafter/reading.py: files of every form, as their projects save them, into plan and spec."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_model.checkpoint.directory import LocalDirectory
from dflash_model.checkpoint.extract import ExtractPlan, plan_extraction
from dflash_model.checkpoint.open_table import open_directory_table, open_table
from dflash_model.checkpoint.source import LocalFile
from dflash_model.drafter.building import Reading
from dflash_model.drafter.geometry import Geometry
from dflash_model.drafter.reading import GivenConfig, read_directory, read_training_file, tensors_of_plan
from dflash_model.errors import CheckpointError, EvalError
from tests.drafter_forms import (
    DFLASH2,
    DFLASH2_KEYS,
    OWN_TABLES,
    REDUCED,
    deepspec_config,
    geometry_with,
    speculators_config,
)
from tests.tiny_drafters import GEOMETRY, zlab_config

KEPT = [0, 1, 2, 3, 7, 8, *range(20, 32), 40, 49]
"""The 20 target ids of the reduced vocabulary."""


def tensors(geometry: Geometry) -> dict[str, Tensor]:
    made = {name: torch.ones(shape) for name, shape in geometry.tensor_shapes().items()}
    if geometry.parts.map_rows is not None:
        made["d2t"] = torch.tensor([target - row for row, target in enumerate(KEPT)])
    return made


def marks(ids: list[int], size: int = 50) -> Tensor:
    return torch.tensor([number in ids for number in range(size)])


def opened(path: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> tuple[ExtractPlan, Reading]:
    save_file(weights, path / "model.safetensors")
    with LocalDirectory(path) as directory:
        plan = plan_extraction(open_directory_table(directory), keep_vocab=True)
        return plan, read_directory(tensors_of_plan(plan), config)


def names(plan: ExtractPlan) -> set[str]:
    return {tensor.name for tensor in plan.tensors}


def test_every_form_is_known_by_its_config(tmp_path: Path) -> None:
    forms: dict[str, tuple[dict[str, Any], Geometry]] = {
        "zlab": (zlab_config(), GEOMETRY),
        "speculators": (speculators_config(), GEOMETRY),
        "deepspec": (deepspec_config(), OWN_TABLES),
    }
    for form, (config, geometry) in forms.items():
        (tmp_path / form).mkdir()
        plan, reading = opened(tmp_path / form, config, tensors(geometry))
        assert reading.spec.source_format == form
        assert names(plan) == set(geometry.tensor_shapes())


def test_a_reduced_vocabulary_keeps_d2t_and_leaves_t2d_behind_once_compared(tmp_path: Path) -> None:
    plan, reading = opened(tmp_path, speculators_config(draft_vocab_size=20), tensors(REDUCED) | {"t2d": marks(KEPT)})
    assert reading.spec.draft_vocab_size == 20
    assert {"d2t", "lm_head.weight"} <= names(plan)
    assert "t2d" not in names(plan)
    assert plan.state.dropped["t2d"].startswith("says what d2t says")


def test_speculators_codebooks_lose_the_suffix_that_only_they_have(tmp_path: Path) -> None:
    weights = tensors(DFLASH2)
    for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        weights[f"{name}.weight"] = weights.pop(name)
    config = speculators_config(speculators_model_type="dflash2", **DFLASH2_KEYS)
    plan, reading = opened(tmp_path, config, weights)
    assert names(plan) == set(DFLASH2.tensor_shapes())
    assert reading.spec.family == "dflash2"


ARGS = {"block_size": 5, "mask_token_id": 3, "target_layer_ids": [1, 3, 4], "rope_theta": 100.0, "rms_norm_eps": 1e-5}


def from_training_file(path: Path, geometry: Geometry, args: dict[str, Any] = ARGS) -> tuple[ExtractPlan, Reading]:
    state = {f"module._orig_mod.{name}": tensor for name, tensor in tensors(geometry).items()}
    torch.save({"draft_state_dict": state, "args": args, "global_step": 7}, path / "training_state.pt")
    with LocalFile(path / "training_state.pt") as source:
        plan = plan_extraction(open_table(source))
        return plan, read_training_file(tensors_of_plan(plan), plan.facts, plan.state.dropped, GivenConfig())


def test_full_tables_in_a_training_file_are_the_targets_frozen_copies_and_that_is_said(tmp_path: Path) -> None:
    plan, reading = from_training_file(tmp_path, OWN_TABLES, ARGS | {"layer_types": ["full_attention"] * 2, "shift_label": False})
    assert names(plan) == set(GEOMETRY.tensor_shapes())
    assert (reading.spec.owns_embedding, reading.spec.owns_head) == (False, False)
    (warning,) = reading.warnings
    assert "embed_tokens.weight and" in warning
    assert "taken for the target's frozen copies" in warning


def test_a_head_with_a_map_stays_even_in_a_training_file(tmp_path: Path) -> None:
    plan, reading = from_training_file(tmp_path, REDUCED, ARGS | {"vocab_size": 50})
    assert {"d2t", "lm_head.weight"} <= names(plan)
    assert (reading.spec.owns_head, reading.spec.draft_vocab_size) == (True, 20)


def test_what_a_training_file_leaves_open_is_a_warning(tmp_path: Path) -> None:
    _, reading = from_training_file(tmp_path, GEOMETRY)
    assert len(reading.warnings) == 2
    assert reading.warnings[0].startswith("Nothing states the attention masks")
    assert reading.warnings[1].startswith("Nothing states the slot layout")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d2t": torch.tensor(KEPT)}, r"d2t holds absolute ids \(entry 0 is 0, entry 19 is 49\), expected offsets"),
        ({"d2t": torch.tensor(KEPT), "t2d": ...}, "d2t holds absolute ids"),
        ({"t2d": marks([*KEPT[:-1], 48])}, "d2t and t2d disagree: only one of them names the target's id 48"),
        ({"d2t": torch.full((20,), 31)}, r"d2t\[19\] is 31, so row 19 would be the target's id 50, outside its vocabulary of 50"),
        ({"d2t": torch.tensor([-1, *[0] * 19])}, r"d2t\[0\] is -1, so row 0 would be the target's id -1"),
        ({"d2t": torch.tensor([0, 0, -1, *[0] * 17])}, "d2t names the target's id 1 in two rows"),
        ({"d2t": torch.zeros(20)}, "d2t in .* is stored as F32, expected I64 or I32"),
        ({"d2t": torch.zeros(19, dtype=torch.int64), "t2d": ...}, "d2t has 19 entries, but lm_head.weight has 20 rows"),
        ({"d2t": ...}, "holds t2d but no d2t"),
        ({"d2t": ..., "t2d": ...}, "lm_head.weight has 20 rows, but .*vocab_size is 50, and the file holds no d2t"),
        ({"lm_head.weight": ...}, "holds d2t but no lm_head.weight"),
    ],
)  # fmt: skip
def test_a_vocabulary_map_that_cannot_be_meant_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    weights = {name: tensor for name, tensor in (tensors(REDUCED) | {"t2d": marks(KEPT)} | change).items() if tensor is not ...}
    with pytest.raises(EvalError, match=message):
        opened(tmp_path, speculators_config(draft_vocab_size=20), weights)


def test_a_map_without_marks_passes_where_its_offsets_run(tmp_path: Path) -> None:
    assert opened(tmp_path, speculators_config(draft_vocab_size=20), tensors(REDUCED))[1].spec.draft_vocab_size == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers.0.attention_conv.base_kernel": ...}, "no tensor layers.0.attention_conv.base_kernel"),
        ({"layers.1.mlp_conv.base_kernel": ...}, "lacks 1 of the drafter's tensors: layers.1.mlp_conv.base_kernel"),
        ({"layers.0.attention_conv.kernel_projection.weight": torch.ones(10, 24)}, "has 10 rows, which no group size"),
        ({"candidate_selector.successor_codebook": torch.ones(50, 5)}, r"successor_codebook has shape \[50, 5\], expected \[50, 4\]"),
    ],
)  # fmt: skip
def test_a_dflash2_tensor_that_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    weights = {name: tensor for name, tensor in (tensors(DFLASH2) | change).items() if tensor is not ...}
    config = zlab_config(architectures=["DFlash2DraftModel"], dflash_config=DFLASH2_KEYS)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, config, weights)


def test_a_mask_embedding_is_one_row(tmp_path: Path) -> None:
    geometry = geometry_with(mask_embedding=True)
    assert opened(tmp_path, zlab_config(), tensors(geometry))[1].spec.mask_embedding
    with pytest.raises(CheckpointError, match=r"mask_embedding has shape \[1, 24\], expected \[24\]"):
        opened(tmp_path, zlab_config(), tensors(geometry) | {"mask_embedding": torch.ones(1, 24)})
