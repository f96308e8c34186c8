"""Tables give the model's own logits for every listed family, in the stored dtype, and refuse what they cannot carry."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_model.errors import CheckpointError, ConfigError, InputError, StorageError
from dflash_model.target.backbone import backbone_of, load_backbone
from dflash_model.target.fingerprint import fingerprint
from dflash_model.target.hidden_states import extract
from dflash_model.target.layer_checks import relative_l2
from dflash_model.target.tables import NORM_FORMS, ONE_PLUS, PLAIN, load_tables, write_tables
from tests.tiny_targets import CONFIGS, DEMO_TARGET, tiny_model, tiny_multimodal_model

IDS = (5, 9, 14, 3, 22)


def _saved(tmp_path: Path, model: Any) -> Path:
    model.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def _edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): value for name, value in changes.items() if value is not None}
    kept = {name: value for name, value in tensors.items() if changes.get(name.replace(".", "__"), value) is not None}
    save_file(kept, path, {"format": "pt"})


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([IDS])).logits[0]
    return logits


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_tables_of_each_family_give_the_models_logits_and_the_other_norm_form_does_not(tmp_path: Path, kind: str) -> None:
    model = tiny_model(kind)
    facts = write_tables(_saved(tmp_path, model), tmp_path / "out")
    tables = load_tables(tmp_path / "out", torch.float32)
    final = extract(backbone_of(model), IDS, [1]).final
    assert relative_l2(tables.logits(final), _logits(model)) < 1e-5
    wrong = replace(tables, norm_form=PLAIN if tables.norm_form == ONE_PLUS else ONE_PLUS)
    assert relative_l2(wrong.logits(final), _logits(model)) > 1e-2
    assert relative_l2(tables.logits(final, normed=True), _logits(model)) > 1e-2
    assert relative_l2(tables.logits(tables.normalize(final), normed=True), _logits(model)) < 1e-5
    assert facts == tables.facts
    assert facts["model_type"] == kind


def test_every_listed_family_was_tested_or_is_its_wrapper() -> None:
    wrappers = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text"}
    assert set(NORM_FORMS) == set(CONFIGS) | set(wrappers)
    assert all(NORM_FORMS[wrapper] == NORM_FORMS[text] for wrapper, text in wrappers.items())


@pytest.mark.parametrize(
    ("kind", "scale"), [("gemma2", 32**0.5), ("gemma3_text", 32**0.5), ("qwen3", 1.0), ("qwen3_5_text", 1.0)]
)
def test_the_embedding_scale_is_recorded_and_the_rows_are_raw(tmp_path: Path, kind: str, scale: float) -> None:
    model = tiny_model(kind)
    write_tables(_saved(tmp_path, model), tmp_path / "out")
    tables = load_tables(tmp_path / "out")
    rows = tables.embed[list(IDS)] * tables.embedding_scale
    assert tables.embedding_scale == scale
    assert torch.allclose(rows, extract(backbone_of(model), IDS, [0]).taps[0], rtol=1e-5)
    assert torch.equal(tables.embed, model.get_input_embeddings().weight)


def test_a_multimodal_checkpoint_has_its_tables_under_another_prefix(tmp_path: Path) -> None:
    directory = _saved(tmp_path, tiny_multimodal_model())
    facts = write_tables(directory, tmp_path / "out")
    backbone = load_backbone(directory, dtype="float32")
    tables = load_tables(tmp_path / "out")
    assert relative_l2(tables.logits(extract(backbone, IDS, [1]).final), _logits(backbone.model)) < 1e-5
    assert (facts["model_type"], facts["norm_form"]) == ("qwen3_5_text", ONE_PLUS)


def test_the_demo_targets_tables_keep_their_dtype_and_name_their_target(tmp_path: Path) -> None:
    facts = write_tables(DEMO_TARGET, tmp_path)
    stored, wide = load_tables(tmp_path), load_tables(tmp_path, torch.float32)
    assert stored.embed.dtype == stored.head.dtype == stored.norm.dtype == torch.bfloat16
    assert wide.embed.dtype == torch.float32
    assert torch.equal(stored.head.float(), wide.head)
    assert torch.equal(stored.embed, load_file(DEMO_TARGET / "model.safetensors")["model.embed_tokens.weight"])
    assert not torch.equal(stored.embed, stored.head)
    assert facts["weights_digest"] == fingerprint(DEMO_TARGET).weights_digest
    assert (facts["tied"], facts["vocab_rows"], facts["hidden_size"], facts["rms_norm_eps"]) == (False, 512, 96, 1e-6)


def test_a_tied_head_is_the_embedding_and_is_stored_once(tmp_path: Path) -> None:
    model = tiny_model("qwen3", tie_word_embeddings=True)
    directory = _saved(tmp_path, model)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    assert write_tables(directory, tmp_path / "out")["tied"] is True
    tables = load_tables(tmp_path / "out", torch.float32)
    assert tables.head is tables.embed
    assert set(load_file(tmp_path / "out" / "tables.safetensors")) == {"embed", "norm"}
    assert relative_l2(tables.logits(extract(backbone_of(model), IDS, [1]).final), _logits(model)) < 1e-5


def test_a_head_that_is_missing_or_contradicts_the_config_is_refused(tmp_path: Path) -> None:
    directory = _saved(tmp_path, tiny_model("qwen3"))
    _edit_config(directory, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"ties head and embedding, but lm_head\.weight differs"):
        write_tables(directory, tmp_path / "out")
    _edit_config(directory, tie_word_embeddings=False)
    _edit_tensors(directory, lm_head__weight=None)
    with pytest.raises(InputError, match=r"has none; looked for lm_head\.weight"):
        write_tables(directory, tmp_path / "out")


def test_unknown_tensors_and_model_types_are_named(tmp_path: Path) -> None:
    directory = _saved(tmp_path, tiny_model("qwen3"))
    _edit_tensors(directory, model__norm__weight=None)
    with pytest.raises(InputError, match=r"looked for model\.embed_tokens\.weight, model\.language_model\.embed_tokens\.weight"):
        write_tables(directory, tmp_path / "out")
    _edit_config(directory, model_type="rwkv")
    with pytest.raises(InputError, match="model_type 'rwkv' is not known"):
        write_tables(directory, tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"logits_scaling": 8.0}, {}, "logits_scaling = 8.0"),
        ({"rms_norm_eps": None}, {}, "rms_norm_eps is None"),
        ({}, {"lm_head__bias": torch.zeros(40)}, "head has a bias"),
        ({}, {"model__norm__weight": torch.ones(31)}, "do not fit each other"),
        ({"hidden_size": 64}, {}, "do not fit each other and hidden_size 64"),
        ({}, {"model__embed_tokens__weight": torch.zeros(40, 32, dtype=torch.float8_e4m3fn)}, "stored as torch.float8_e4m3fn"),
    ],
)
def test_what_the_tables_cannot_carry_is_refused(tmp_path: Path, config: Any, tensors: Any, message: str) -> None:
    directory = _saved(tmp_path, tiny_model("qwen3"))
    _edit_config(directory, **config)
    _edit_tensors(directory, **tensors)
    with pytest.raises((InputError, CheckpointError), match=message):
        write_tables(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_tables_and_float16_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no target tables file"):
        load_tables(tmp_path)
    write_tables(DEMO_TARGET, tmp_path)
    with pytest.raises(ConfigError, match="cannot be used in"):
        load_tables(tmp_path, torch.float16)
    path = tmp_path / "tables.safetensors"
    tensors = load_file(path)
    save_file(tensors, path, {"tables_version": "1"})
    with pytest.raises(StorageError, match="is damaged"):
        load_tables(tmp_path)
    save_file(tensors, path, {"tables_version": "0"})
    with pytest.raises(StorageError, match="tables version 0, expected 1"):
        load_tables(tmp_path)
