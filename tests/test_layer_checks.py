"""Each exact check holds on a right target and fails on the fault that it is there for, and only that one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dflash_model.errors import ConfigError
from dflash_model.target.backbone import Backbone, backbone_of, load_backbone
from dflash_model.target.layer_checks import check_layers, relative_l2
from dflash_model.target.tables import PLAIN, Tables, load_tables, write_tables
from tests.tiny_targets import DEMO_TARGET, tiny_model

IDS = (5, 9, 14, 3, 22, 31, 8, 17, 12, 6)
TUPLE, NEIGHBOURS, EMBEDDING, HEAD, CHUNKS = (
    "hooks equal output_hidden_states",
    "neighbouring layers differ",
    "embedding table equals tap 0",
    "tables give the model's logits",
    "two chunks equal one pass",
)


@pytest.fixture
def hybrid(tmp_path: Path) -> tuple[Backbone, Tables]:
    return _pair("qwen3_5_text", tmp_path)


def _pair(kind: str, tmp_path: Path) -> tuple[Backbone, Tables]:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "target")
    write_tables(tmp_path / "target", tmp_path / "out")
    return backbone_of(model), load_tables(tmp_path / "out", torch.float32)


def _failed(backbone: Backbone, tables: Tables) -> list[str]:
    return [check.name for check in check_layers(backbone, IDS, [1, 2, 4], tables=tables) if not check.passed]


class _Altered(nn.Module):
    """A decoder whose call is altered by a function of (decoder, keyword arguments)."""

    def __init__(self, decoder: Any, call: Callable[[Any, dict[str, Any]], Any]) -> None:
        super().__init__()
        self.inner = decoder
        self.call = call

    def forward(self, **kwargs: Any) -> Any:
        return self.call(self.inner, kwargs)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3", "llama", "gemma2"])
def test_all_checks_hold_on_a_right_target(tmp_path: Path, kind: str) -> None:
    backbone, tables = _pair(kind, tmp_path)
    checks = check_layers(backbone, IDS, [1, 2, 4], tables=tables)
    assert [check.name for check in checks] == [TUPLE, NEIGHBOURS, EMBEDDING, HEAD, CHUNKS]
    assert [check.name for check in checks if not check.passed] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_checks_hold_on_the_demo_target(tmp_path: Path, dtype: str) -> None:
    write_tables(DEMO_TARGET, tmp_path)
    backbone = load_backbone(DEMO_TARGET, dtype=dtype)
    checks = check_layers(backbone, range(60, 100), [2, 5, 7], tables=load_tables(tmp_path, torch.float32))
    assert [(check.name, check.detail) for check in checks if not check.passed] == []


def test_an_output_tuple_that_is_off_by_one_layer_is_seen(hybrid: tuple[Backbone, Tables]) -> None:
    def shifted(decoder: Any, kwargs: dict[str, Any]) -> Any:
        output = decoder(**kwargs)
        if output.hidden_states is not None:
            output.hidden_states = output.hidden_states[1:] + output.hidden_states[-1:]
        return output

    backbone, tables = hybrid
    assert _failed(replace(backbone, decoder=_Altered(backbone.decoder, shifted)), tables) == [TUPLE]


def test_a_decoder_that_gives_no_hidden_states_is_seen(hybrid: tuple[Backbone, Tables]) -> None:
    def silent(decoder: Any, kwargs: dict[str, Any]) -> Any:
        return decoder(**(kwargs | {"output_hidden_states": False}))

    backbone, tables = hybrid
    assert _failed(replace(backbone, decoder=_Altered(backbone.decoder, silent)), tables) == [TUPLE]


def test_a_layer_that_changes_nothing_is_seen_as_a_doubled_tap(hybrid: tuple[Backbone, Tables]) -> None:
    backbone, tables = hybrid
    with torch.no_grad():
        for name in ("linear_attn.out_proj", "mlp.down_proj"):
            backbone.layers[1].get_submodule(name).weight.zero_()  # type: ignore[operator]
    assert _failed(backbone, tables) == [NEIGHBOURS]


def test_tables_of_the_wrong_norm_form_or_another_embedding_are_seen(hybrid: tuple[Backbone, Tables]) -> None:
    backbone, tables = hybrid
    assert _failed(backbone, replace(tables, norm_form=PLAIN)) == [HEAD]
    assert _failed(backbone, replace(tables, embedding_scale=1.01)) == [EMBEDDING]
    assert _failed(backbone, replace(tables, head=tables.head.roll(1, dims=0))) == [HEAD]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3"])
def test_state_that_is_not_carried_between_chunks_is_seen(tmp_path: Path, kind: str) -> None:
    def forgetful(decoder: Any, kwargs: dict[str, Any]) -> Any:
        return decoder(**{name: value for name, value in kwargs.items() if name != "cache"})

    backbone, tables = _pair(kind, tmp_path)
    assert _failed(replace(backbone, decoder=_Altered(backbone.decoder, forgetful)), tables) == [CHUNKS]


def test_bad_arguments_are_refused(hybrid: tuple[Backbone, Tables]) -> None:
    backbone, tables = hybrid
    with pytest.raises(ConfigError):
        check_layers(backbone, IDS, [9], tables=tables)
    with pytest.raises(ValueError, match="at least two tokens"):
        check_layers(backbone, IDS[:1], [1], tables=tables)


def test_relative_distance_by_hand() -> None:
    assert relative_l2(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])) == 0.75
    assert relative_l2(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_l2(torch.ones(2), torch.zeros(2)) == float("inf")
