"""States in the engines' own forms: found by tokens, refused with the reason when they are not what they should be."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.errors import CheckpointError, ConfigError, InputError, StorageError
from dflash_model.target.engine_states import EngineFiles, open_engine_files

TOKENS = (4, 8, 2, 9)
LAYERS, HIDDEN = 3, 2


def _states() -> torch.Tensor:
    """[N, L, H]; the value at token n, stored layer l, channel c is 100 n + 10 l + c + 1."""
    rows = [[[100 * n + 10 * layer + c + 1 for c in range(HIDDEN)] for layer in range(LAYERS)] for n in range(len(TOKENS))]
    return torch.tensor(rows, dtype=torch.float32)


def _vllm(path: Path, states: torch.Tensor | None = None, tokens: Any = TOKENS) -> Path:
    """A file as vLLM's connector writes it, with its lock released."""
    states = _states().to(torch.bfloat16) if states is None else states
    save_file({"hidden_states": states.contiguous(), "token_ids": torch.tensor(tokens)}, path)
    path.with_name(path.name + ".lock").touch()
    return path


def _sglang(path: Path, states: torch.Tensor | None = None, **answer: Any) -> Path:
    """A /generate answer: the prompt's rows in one list, then a row for each generated token."""
    states = _states() if states is None else states
    hidden = [states.flatten(1).tolist(), [0.5] * (LAYERS * HIDDEN)]
    given = {"text": "x", "output_ids": [7], "meta_info": {"prompt_tokens": len(TOKENS), "hidden_states": hidden}}
    path.write_text(json.dumps(given | (answer or {"prompt_token_ids": list(TOKENS)})))
    return path


def _open(directory: Path, engine: str = "vllm", ids: tuple[int, ...] = (2, 3, 5)) -> EngineFiles:
    return open_engine_files(engine, directory, ids, num_layers=5)


def test_vllms_files_are_found_by_their_tokens_and_its_ids_are_tap_indices(tmp_path: Path) -> None:
    _vllm(tmp_path / "cmpl-1.safetensors", tokens=(1, 1, 1, 1))
    _vllm(tmp_path / "cmpl-2.safetensors")
    _vllm(tmp_path / "cmpl-3.safetensors", tokens=torch.tensor([3, 3, 3, 3], dtype=torch.int32).tolist())
    files = _open(tmp_path)
    assert files.tap_indices == (2, 3, 5)
    states = files.read(TOKENS, hidden_size=HIDDEN)
    assert states.dtype == torch.bfloat16
    assert torch.equal(states, _states().to(torch.bfloat16))


def test_sglangs_answers_give_the_prompts_rows_and_its_ids_are_one_lower(tmp_path: Path) -> None:
    _sglang(tmp_path / "a.json")
    files = _open(tmp_path, "sglang", (1, 2, 4))
    assert files.tap_indices == (2, 3, 5)
    assert torch.equal(files.read(TOKENS, hidden_size=HIDDEN), _states())
    for place in (
        {"input_ids": list(TOKENS)},
        {"meta_info": {"prompt_token_ids": list(TOKENS), "hidden_states": [_states().flatten(1).tolist()]}},
    ):
        _sglang(tmp_path / "a.json", **place)
        assert torch.equal(_open(tmp_path, "sglang", (1, 2, 4)).read(TOKENS, hidden_size=HIDDEN), _states())
    _sglang(tmp_path / "a.json", text="y")
    with pytest.raises(InputError, match="does not say which tokens it is of"):
        _open(tmp_path, "sglang", (1, 2, 4))


def test_a_sample_without_a_file_is_told_what_there_is_of_it(tmp_path: Path) -> None:
    _vllm(tmp_path / "a.safetensors", _states()[:3], TOKENS[:3])
    files = _open(tmp_path)
    with pytest.raises(InputError, match=r"No vllm file is of these 4 tokens .*; one is of their first 3 only"):
        files.read(TOKENS, hidden_size=HIDDEN)
    with pytest.raises(InputError, match="; 1 are of others"):
        files.read((1, 2, 3), hidden_size=HIDDEN)


def _with(value: float, *place: Any) -> torch.Tensor:
    states = _states()
    states[place] = value
    return states


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (_states()[:3], r"states of shape \[3, 3, 2\] where \[4, 3, 2\] are expected"),
        (_states().transpose(0, 1), r"states of shape \[3, 4, 2\]"),
        (_states()[:, :2], r"states of shape \[4, 2, 2\]"),
        (_states().half(), "float16; only bfloat16 and float32"),
        (_with(float("nan"), 2, 1, 0), "NaN or infinite values, first in row 2 of layer 1"),
        (_with(0.0, slice(None), 2), "nothing but zeros in layer 2"),
    ],
)
def test_states_that_cannot_be_right_are_refused(tmp_path: Path, states: torch.Tensor, message: str) -> None:
    _vllm(tmp_path / "a.safetensors", states)
    with pytest.raises(StorageError, match=message):
        _open(tmp_path).read(TOKENS, hidden_size=HIDDEN)


def test_a_file_in_the_making_is_not_taken_for_whole(tmp_path: Path) -> None:
    path = _vllm(tmp_path / "a.safetensors")
    with path.with_name(path.name + ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="still being written"):
            _open(tmp_path)
    assert len(_open(tmp_path).places) == 1
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="truncated"):
        _open(tmp_path)


def test_foreign_and_compressed_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no vllm states"):
        _open(tmp_path)
    (tmp_path / "b.safetensors.zst").touch()
    with pytest.raises(InputError, match="is compressed"):
        _open(tmp_path)
    (tmp_path / "b.safetensors.zst").unlink()
    save_file({"weight": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="instead of token_ids and hidden_states"):
        _open(tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(StorageError, match="is not JSON"):
        _open(tmp_path, "sglang", (1, 2, 4))
    (tmp_path / "a.json").write_text('{"meta_info": {}}')
    with pytest.raises(InputError, match=r"no /generate answer with meta_info.hidden_states"):
        _open(tmp_path, "sglang", (1, 2, 4))
    with pytest.raises(InputError, match="Not found"):
        _open(tmp_path / "absent")


@pytest.mark.parametrize(("engine", "ids"), [("vllm", ()), ("vllm", (2, 2)), ("vllm", (6,)), ("sglang", (5,)), ("vllm", (-1,))])
def test_impossible_layer_ids_are_refused(tmp_path: Path, engine: str, ids: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="do not fit"):
        _open(tmp_path, engine, ids)
    with pytest.raises(ConfigError, match="'tgi' cannot be read"):
        _open(tmp_path, "tgi")
