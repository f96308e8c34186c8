"""A sample's states on disk: the layout others read, checks that name the fault, taps picked in the order wanted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflash_model.errors import InputError, StorageError
from dflash_model.target.references import Reference
from dflash_model.target.states_file import SampleStates, read_states, select_taps, write_states

BACKEND = {"kernels": {"chunk_gated_delta_rule": "torch"}, "dtype": "float32"}


def _states(taps: tuple[int, ...] = (2, 5, 7), **changes: Any) -> SampleStates:
    """Three tokens, H = 2; the value at token n, tap k, channel c is 100 n + 10 k + c."""
    rows = [[[100 * n + 10 * k + c for c in (1, 2)] for k in taps] for n in range(3)]
    states = SampleStates(
        sample_id="a",
        token_ids=(4, 8, 2),
        tap_indices=taps,
        hidden_states=torch.tensor(rows, dtype=torch.float32),
        target_digest="t" * 64,
        backend=BACKEND,
    )
    return replace(states, **changes)


def _rewritten(path: Path, metadata: dict[str, str | None] | None = None, **tensors: torch.Tensor) -> Path:
    """The same file with some metadata and tensors exchanged, past the writer's checks."""
    with safe_open(path, framework="pt") as file:
        merged = {name: value for name, value in ((file.metadata() or {}) | (metadata or {})).items() if value is not None}
    save_file(load_file(path) | tensors, path, merged)
    return path


def test_states_survive_the_file_in_the_public_layout(tmp_path: Path) -> None:
    path = tmp_path / "hs_0.safetensors"
    write_states(path, _states())
    tensors = load_file(path)
    assert set(tensors) == {"token_ids", "hidden_states"}
    assert (tensors["token_ids"].dtype, tensors["token_ids"].tolist()) == (torch.int64, [4, 8, 2])
    assert tensors["hidden_states"].shape == (3, 3, 2)
    read = read_states(path)
    assert torch.equal(read.hidden_states, _states().hidden_states)
    found = (read.sample_id, read.token_ids, read.tap_indices, read.target_digest, read.backend)
    assert found == ("a", (4, 8, 2), (2, 5, 7), "t" * 64, BACKEND)


def test_the_metadata_says_which_layers_and_that_they_are_raw(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write_states(path, _states(hidden_states=_states().hidden_states.to(torch.bfloat16)))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["tap_indices"]) == [2, 5, 7]
    assert (metadata["final_norm"], metadata["dtype"], metadata["format_version"]) == ("false", "bfloat16", "1")
    assert "output of decoder layer k-1" in metadata["convention"]


def test_its_token_digest_is_the_references() -> None:
    reference = Reference(
        sample_id="a", prompt_ids=(4,), completion_ids=(8, 2), overshoot_ids=(1,), finish="stop", logprobs=None, engine="x"
    )
    assert _states().token_digest == reference.token_digest


def _with(value: float, *place: Any) -> torch.Tensor:
    hidden = _states().hidden_states.clone()
    hidden[place] = value
    return hidden


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_states": _with(float("nan"), 1, 2, 0)}, "NaN or infinite values in tap 7"),
        ({"hidden_states": _with(float("inf"), 0, 0, 0)}, "NaN or infinite values in tap 2"),
        ({"hidden_states": _with(0.0, slice(None), 1)}, "nothing but zeros in tap 5"),
        ({"hidden_states": _states().hidden_states[:2]}, r"3 tokens and 3 taps, but states of shape \(2, 3, 2\)"),
        ({"hidden_states": _states().hidden_states.half()}, "float16; only bfloat16 and float32"),
        ({"tap_indices": (5, 2, 7)}, "taps that do not ascend"),
        ({"tap_indices": (2, 5)}, "3 tokens and 2 taps"),
    ],
)
def test_states_not_worth_keeping_are_refused_by_writer_and_reader(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(StorageError, match=message):
        write_states(path, _states(**changes))
    assert not path.exists()
    write_states(path, _states())
    hidden = changes.get("hidden_states", _states().hidden_states)
    metadata: dict[str, str | None] = {"tap_indices": json.dumps(changes.get("tap_indices", (2, 5, 7)))}
    with pytest.raises(StorageError, match=message):
        read_states(_rewritten(path, metadata, hidden_states=hidden.contiguous()))


def test_one_zero_row_in_a_layer_is_kept(tmp_path: Path) -> None:
    """The embedding row of a pad token is zero in honest states."""
    write_states(tmp_path / "s.safetensors", _states(hidden_states=_with(0.0, 1, 0)))
    assert not read_states(tmp_path / "s.safetensors").hidden_states[1, 0].any()


def test_other_tokens_than_the_digest_says_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    write_states(path, _states())
    with pytest.raises(StorageError, match="other tokens than its token_digest"):
        read_states(_rewritten(path, token_ids=torch.tensor([4, 8, 3])))


def test_a_serving_engines_file_an_old_version_and_damage_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with pytest.raises(InputError, match="no hidden states file"):
        read_states(path)
    write_states(path, _states())
    with pytest.raises(InputError, match="does not say which layers"):
        read_states(_rewritten(path, {"tap_indices": None}))
    with pytest.raises(StorageError, match="format_version 7, expected 1"):
        read_states(_rewritten(path, {"tap_indices": "[2, 5, 7]", "format_version": "7"}))
    with pytest.raises(StorageError, match="is damaged"):
        read_states(_rewritten(path, {"format_version": "1", "target_digest": None}))


def test_taps_lie_side_by_side_in_the_order_wanted() -> None:
    assert select_taps([_states()], [7, 2]).tolist() == [[71, 72, 21, 22], [171, 172, 121, 122], [271, 272, 221, 222]]
    assert select_taps([_states()], [2, 7]).tolist() != select_taps([_states()], [7, 2]).tolist()


def test_taps_are_joined_from_several_files_and_a_superset_serves_a_subset() -> None:
    whole = select_taps([_states((2, 3, 5, 7))], [2, 5])
    assert torch.equal(select_taps([_states((2,)), _states((5, 7))], [2, 5]), whole)
    assert torch.equal(select_taps([_states((2, 5)), _states((5, 7))], [2, 5]), whole)


def test_a_tap_that_is_nowhere_is_named_with_what_there_is() -> None:
    with pytest.raises(InputError, match=r"Sample a has states for taps \[2, 5, 7\], but \[4\] are wanted"):
        select_taps([_states()], [2, 4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": (4, 8, 3)}, "differ in token_ids"),
        ({"target_digest": "u" * 64}, "differ in target_digest"),
        ({"hidden_states": _states((3,)).hidden_states.to(torch.bfloat16)}, "different dtypes"),
    ],
)
def test_files_that_do_not_belong_together_are_not_joined(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        select_taps([_states((2,)), _states((3,), **changes)], [2, 3])


@pytest.mark.parity
def test_speculators_own_reader_takes_our_file(tmp_path: Path) -> None:
    """hs-connectors reads cached samples as hs_<index>.safetensors; its check wants these tokens, as many rows, all finite."""
    transfer = pytest.importorskip("hs_connectors.transfer")
    write_states(tmp_path / "hs_3.safetensors", _states())
    read = transfer.FileTransfer(tmp_path).get_cached(3)
    assert read["token_ids"].tolist() == [4, 8, 2]
    assert torch.equal(read["hidden_states"], _states().hidden_states)
    assert transfer.FileTransfer(tmp_path).get_cached(4) is None
