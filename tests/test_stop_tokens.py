"""Stop tokens are what the target's files and its tokenizer say, together."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash_model.errors import InputError
from dflash_model.target.prompts import load_tokenizer
from dflash_model.target.stop_tokens import read_stop_ids
from tests.tiny_targets import DEMO_TARGET


def _directory(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_the_demo_target_stops_at_its_end_of_turn() -> None:
    assert read_stop_ids(DEMO_TARGET, load_tokenizer(DEMO_TARGET)) == (2,)


def test_generation_config_and_tokenizer_are_joined(tmp_path: Path) -> None:
    directory = _directory(tmp_path, {"eos_token_id": 9}, {"eos_token_id": [7, 3]})
    assert read_stop_ids(directory, SimpleNamespace(eos_token_id=5)) == (3, 5, 7)
    assert read_stop_ids(directory, SimpleNamespace(eos_token_id=None)) == (3, 7)


def test_without_a_generation_config_the_models_config_speaks(tmp_path: Path) -> None:
    directory = _directory(tmp_path, {"eos_token_id": 1, "text_config": {"eos_token_id": 9}})
    assert read_stop_ids(directory, SimpleNamespace(eos_token_id=5)) == (5, 9)


def test_a_target_that_names_none_is_refused(tmp_path: Path) -> None:
    directory = _directory(tmp_path, {}, {})
    with pytest.raises(InputError, match="names a stop token"):
        read_stop_ids(directory, SimpleNamespace(eos_token_id=None))
