"""Which dict is the drafter's, what is left out, and when the reader asks instead of guessing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_model.checkpoint.source import LocalFile
from dflash_model.checkpoint.state_dict import STATE_DICT_KEYS, StateDict, select_state_dict
from dflash_model.checkpoint.torch_file import TensorEntry, read_torch_file
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import drafter_tensors, ordered, save

NAMES = sorted(drafter_tensors())


def selected(value: Any, path: Path, key: str | None = None, *, keep_vocab: bool = False) -> StateDict[TensorEntry]:
    file = read_torch_file(LocalFile(save(value, path / "c.pt")))
    return select_state_dict(file, key, keep_vocab=keep_vocab)


@pytest.mark.parametrize("key", STATE_DICT_KEYS)
def test_each_usual_key_is_unwrapped(tmp_path: Path, key: str) -> None:
    found = selected(
        {key: ordered(drafter_tensors()), "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "step": 1}, tmp_path
    )
    assert (found.key_path, list(found.tensors), found.dropped) == (key, NAMES, {})


def test_a_bare_dict_is_taken_and_its_inner_dicts_are_not(tmp_path: Path) -> None:
    found = selected(drafter_tensors() | {"optimizer": {"fc.weight": torch.ones(1)}, "step": 3}, tmp_path)
    assert (found.key_path, list(found.tensors)) == ("", NAMES)
    assert found.tensors["fc.weight"].shape == (8, 24)


def test_dicts_in_dicts_are_unwrapped(tmp_path: Path) -> None:
    assert selected({"state_dict": {"model": drafter_tensors()}}, tmp_path).key_path == "state_dict.model"


def test_tensors_beside_a_usual_key_do_not_confuse(tmp_path: Path) -> None:
    saved = {"model": drafter_tensors(), "rng_state": torch.zeros(9, dtype=torch.uint8)}
    assert selected(saved, tmp_path).key_path == "model"


def test_usual_keys_without_tensors_are_no_candidates(tmp_path: Path) -> None:
    saved = {"model_state_dict": drafter_tensors(), "model": {"hidden_size": 8}, "state_dict": "later"}
    assert selected(saved, tmp_path).key_path == "model_state_dict"


def test_two_candidates_are_listed_and_the_key_decides(tmp_path: Path) -> None:
    saved = {"model": drafter_tensors(), "draft_state_dict": drafter_tensors(layers=2), "step": 1}
    with pytest.raises(CheckpointError, match=r"several dicts .*: draft_state_dict, model\.") as caught:
        selected(saved, tmp_path)
    assert "key" in caught.value.fix
    assert len(selected(saved, tmp_path, "draft_state_dict").tensors) == 25
    assert len(selected(saved, tmp_path, "model").tensors) == 14


def test_bare_drafter_tensors_beside_a_usual_key_are_a_candidate_too(tmp_path: Path) -> None:
    saved = drafter_tensors() | {"model": drafter_tensors(layers=2)}
    with pytest.raises(CheckpointError, match="the top level, model"):
        selected(saved, tmp_path)
    assert len(selected(saved, tmp_path, "").tensors) == 14


def test_a_dotted_key_reaches_nested_dicts_and_keys_with_dots(tmp_path: Path) -> None:
    saved = {"state": {"drafter.best": drafter_tensors(), "target": drafter_tensors(layers=2)}}
    assert list(selected(saved, tmp_path, "state.drafter.best").tensors) == NAMES
    with pytest.raises(CheckpointError, match="keeps no tensors at its top level or under") as caught:
        selected(saved, tmp_path)
    assert "state" in caught.value.fix


def test_a_key_may_be_a_prefix_of_flat_names(tmp_path: Path) -> None:
    saved = {"model": ordered(drafter_tensors(), "drafter.") | ordered(drafter_tensors(layers=2), "target.")}
    found = selected(saved, tmp_path, "model.drafter")
    assert (list(found.tensors), found.key_path) == (NAMES, "model.drafter")


@pytest.mark.parametrize("key", ["absent", "mod", "model.fc.weight.more"])
def test_a_key_without_tensors_is_an_error_that_lists_the_keys(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"no tensors under {key}") as caught:
        selected({"model": drafter_tensors(), "ema": {"fc.weight": torch.ones(1)}}, tmp_path, key)
    assert "model, ema" in caught.value.fix


def test_prefixes_and_spellings_are_cleaned_and_reported(tmp_path: Path) -> None:
    tensors = drafter_tensors()
    tensors["context_proj.weight"] = tensors.pop("fc.weight")
    found = selected({"model": ordered(tensors, "module._orig_mod.")}, tmp_path)
    assert list(found.tensors) == NAMES
    assert set(found.prefixes) == {"module.", "_orig_mod."}
    assert found.renamed == {"fc.weight": "module._orig_mod.context_proj.weight"}


def test_two_tensors_of_one_clean_name_are_an_error_naming_both(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"both model\.norm\.weight and norm\.weight, which would both be called norm\.weight"
    ):
        selected({"model_state_dict": ordered(drafter_tensors(), "model.") | {"norm.weight": torch.ones(8)}}, tmp_path)


def test_vocabulary_tables_go_unless_they_are_asked_for(tmp_path: Path) -> None:
    tables = {"embed_tokens.weight": torch.ones(4, 8), "lm_head.weight": torch.ones(4, 8), "t2d": torch.ones(4, dtype=torch.bool)}
    saved = {"model": ordered(drafter_tensors() | tables | {"rotary_emb.inv_freq": torch.ones(2)}, "model.")}
    found = selected(saved, tmp_path)
    assert list(found.tensors) == NAMES
    assert set(found.dropped) == {f"model.{name}" for name in (*tables, "rotary_emb.inv_freq")}
    kept = selected(saved, tmp_path, keep_vocab=True)
    assert sorted(kept.tensors) == sorted([*NAMES, *tables])
    assert list(kept.dropped) == ["model.rotary_emb.inv_freq"]


def test_an_unreadable_tensor_matters_only_where_it_is_wanted(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    saved = {"model": drafter_tensors() | {"lm_head.weight": sparse}, "optimizer": {"state": {0: sparse}}}
    assert list(selected(saved, tmp_path).tensors) == NAMES
    with pytest.raises(CheckpointError, match=r"model\.lm_head\.weight in .* is a sparse tensor"):
        selected(saved, tmp_path, keep_vocab=True)


@pytest.mark.parametrize("wrap", [lambda module: module, lambda module: {"model": module, "step": 1}])
def test_a_whole_module_is_refused_with_its_class(tmp_path: Path, wrap: Any) -> None:
    with pytest.raises(CheckpointError, match=r"whole nn\.Module \(torch\.nn\.modules\.linear\.Linear\)") as caught:
        selected(wrap(torch.nn.Linear(2, 2)), tmp_path)
    assert "state_dict()" in caught.value.fix


def test_a_whole_module_beside_the_state_dict_is_no_hindrance(tmp_path: Path) -> None:
    saved = {"model_state_dict": drafter_tensors(), "optimizer": torch.nn.Linear(2, 2)}
    assert list(selected(saved, tmp_path).tensors) == NAMES


@pytest.mark.parametrize("saved", [{"step": 1}, [1, 2], torch.ones(2), {"model": {}}])
def test_files_without_named_tensors_say_so(tmp_path: Path, saved: Any) -> None:
    with pytest.raises(CheckpointError, match="holds no tensors"):
        selected(saved, tmp_path)


def test_a_state_dict_of_nothing_but_tables_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no drafter tensors under model: all 1 are"):
        selected({"model": {"lm_head.weight": torch.ones(2)}}, tmp_path)


def test_a_second_copy_inside_the_state_dict_is_dropped_with_a_reason(tmp_path: Path) -> None:
    found = selected({"model": drafter_tensors() | {"ema": {"fc.weight": torch.ones(1)}}}, tmp_path)
    assert list(found.tensors) == NAMES
    assert list(found.dropped) == ["ema.fc.weight"]


def test_modules_nested_as_dicts_are_joined_with_dots(tmp_path: Path) -> None:
    found = selected({"model": {"fc": {"weight": torch.ones(2)}, "norm": {"weight": torch.ones(3)}}}, tmp_path)
    assert {name: entry.shape for name, entry in found.tensors.items()} == {"fc.weight": (2,), "norm.weight": (3,)}
