"""drafter/description.py and tasks/describing.py: what is said of a checkpoint, and that nothing is written where it lies."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.drafter.geometry import Geometry
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import CheckpointError, ConfigError, InputError
from tasks.describing import LookedAt, look_at, writable_config
from tasks.remote.local import LocalHost
from tests.drafter_forms import DFLASH2, DFLASH2_KEYS, OWN_TABLES, deepspec_config, sliding, speculators_config
from tests.tiny_drafters import GEOMETRY, zlab_config

ARGS = {"block_size": 5, "mask_token_id": 3, "target_layer_ids": [1, 3, 4], "rope_theta": 100.0}


@pytest.fixture
def host(tmp_path: Path) -> LocalHost:
    return LocalHost("train", tmp_path / "train", threads=1, slots=1)


def directory(host: LocalHost, config: dict[str, Any], geometry: Geometry = GEOMETRY, **files: str) -> Path:
    path = Path(host.work_dir) / "drafter"
    path.mkdir(parents=True)
    save_file(
        {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in geometry.tensor_shapes().items()},
        path / "model.safetensors",
    )
    for name, content in ({"config.json": json.dumps(config)} | files).items():
        (path / name).write_text(content)
    return path


def training_file(host: LocalHost, args: dict[str, Any]) -> Path:
    path = Path(host.work_dir) / "step-7.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: torch.ones(shape) for name, shape in GEOMETRY.tensor_shapes().items()}
    torch.save({"model_state_dict": state, "optimizer_state_dict": {"m": torch.ones(9)}, "args": args, "step": 7}, path)
    return path


def look(host: LocalHost, path: Path, **given: Any) -> LookedAt:
    return look_at(host, str(path), config_host=host, **given)


def origins(found: LookedAt) -> dict[str, tuple[str, str]]:
    return {field["name"]: (field["origin"], field["place"]) for field in found.description["fields"]}


def test_every_field_says_whether_it_was_read_inferred_or_given(host: LocalHost) -> None:
    found = look(host, training_file(host, ARGS), options={"rms_norm_eps": 1e-5})
    where = origins(found)
    assert where["block_size"] == ("read", "the trainer's saved args block_size")
    assert where["hidden_size"] == ("read", "shape of norm.weight")
    assert where["rms_norm_eps"] == ("given", "--rms-norm-eps")
    assert where["layer_masks"][0] == where["shift"][0] == where["rope"][0] == "inferred"
    assert set(where) == set(DrafterSpec.__dataclass_fields__) - {"provenance"}
    assert found.description["warnings"][0].startswith("Nothing states the attention masks")
    assert found.description["step"] == 7
    assert found.description["drafted_tokens"] == 4
    assert (found.description["state_key"], found.description["unsupported"]) == ("model_state_dict", [])


def test_the_headline_names_family_form_and_size(host: LocalHost) -> None:
    config = speculators_config(
        speculators_model_type="dflash2", transformer_layer_config=sliding(), sample_from_anchor=True, **DFLASH2_KEYS
    )
    found = look(host, directory(host, config, DFLASH2))
    assert found.description["headline"].startswith(
        "DFlash2 drafter in speculators' form: 2 layers, 3 taps, block of 5 rows, 5 drafted tokens, "
    )
    words = {row.name: row.words for row in found.rows}
    assert words["tap_indices"] == "2, 4, 5 (outputs of layers 1, 3, 4)"
    assert words["rope"] == "base 100, 8 dimensions in half-split pairs, default"
    assert "1 x window of 7 from the anchor, causal in the block" in words["layer_masks"]


def test_a_tap_of_the_embedding_is_called_so(host: LocalHost) -> None:
    found = look(host, directory(host, deepspec_config(target_layer_ids=[-1, 3, 4]), OWN_TABLES))
    assert {row.name: row.words for row in found.rows}[
        "tap_indices"
    ] == "0, 4, 5 (the embedding's output and outputs of layers 3, 4)"


def test_what_nothing_states_and_changes_nothing_is_set_apart(host: LocalHost) -> None:
    neutral = {row.name for row in look(host, directory(host, zlab_config())).rows if row.neutral}
    assert {"mask_embedding", "owns_head", "final_logit_softcapping", "output_multiplier", "selector_rank"} <= neutral
    assert not neutral & {"block_size", "layer_masks", "shift", "rope", "attention_bias"}


def test_looking_writes_nothing_where_the_checkpoint_lies(host: LocalHost) -> None:
    path = training_file(host, ARGS | {"rms_norm_eps": 1e-5})
    before = {one: one.stat().st_mtime_ns for one in Path(host.work_dir).rglob("*")}
    look(host, path)
    assert {one: one.stat().st_mtime_ns for one in Path(host.work_dir).rglob("*")} == before


def test_a_given_config_describes_a_file_without_one(host: LocalHost) -> None:
    path = training_file(host, {})
    config = Path(host.work_dir) / "c.json"
    config.write_text(json.dumps(zlab_config()))
    found = look(host, path, config=host.work_dir / "c.json")
    assert origins(found)["block_size"] == ("read", "config.json block_size")


def test_a_written_config_is_read_back_to_the_same_drafter(host: LocalHost) -> None:
    bare = look(host, training_file(host, ARGS | {"rms_norm_eps": 1e-5}))
    written = writable_config(bare.reading.spec)
    there = look(host, directory(host, written))
    assert there.reading.warnings == ()
    same = {"source_format": "", "provenance": {}}
    assert there.reading.spec.to_json() | same == bare.reading.spec.to_json() | same


def test_what_cannot_be_meant_is_an_error_here_as_in_a_run(host: LocalHost) -> None:
    with pytest.raises(CheckpointError, match=r"\[train\] nothing matches .*none"):
        look(host, Path(host.work_dir) / "none")
    with pytest.raises(ConfigError, match="nothing states 1 of the settings"):
        look(host, training_file(host, ARGS))
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt lies beside the weights"):
        look(host, directory(host, zlab_config(), **{"mask_embedding.pt": ""}))


def test_options_that_would_be_passed_over_are_refused(host: LocalHost) -> None:
    path = directory(host, zlab_config())
    with pytest.raises(InputError, match=r"drafter has a config.json of its own, which --block-size cannot change"):
        look(host, path, options={"block_size": 16})
