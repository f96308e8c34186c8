"""Tap index k is entry k of the hidden-states tuple, for every layer and family; the last one is raw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dflash_model.errors import ConfigError, InputError, StageError
from dflash_model.target.backbone import Backbone, backbone_of
from dflash_model.target.hidden_states import extract, extract_padded
from tests.tiny_targets import tiny_model

IDS = (5, 9, 14, 3, 22, 31, 8)
FAMILIES = ("llama", "qwen3", "qwen3_5_text", "gemma2", "qwen3_5_moe_text")


@pytest.fixture(scope="module", params=FAMILIES)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return backbone_of(tiny_model(request.param))


@torch.no_grad()
def _tuple(backbone: Backbone) -> list[torch.Tensor]:
    output = backbone.model(input_ids=torch.tensor([IDS]), output_hidden_states=True, use_cache=False)
    return [states[0] for states in output.hidden_states]


def test_each_tap_equals_its_entry_of_the_tuple_and_no_other(backbone: Backbone) -> None:
    entries = _tuple(backbone)
    taps = extract(backbone, IDS, range(backbone.num_layers + 1)).taps
    assert len(entries) == len(taps) == 5
    for k in range(backbone.num_layers):
        assert torch.equal(taps[k], entries[k])
        assert not any(torch.equal(taps[k], entries[other]) for other in range(5) if other != k)


def test_the_last_tap_is_raw_and_the_tuple_holds_it_normed(backbone: Backbone) -> None:
    captured = extract(backbone, IDS, [backbone.num_layers])
    last = _tuple(backbone)[-1]
    raw = captured.taps[backbone.num_layers]
    assert torch.equal(raw, captured.final)
    assert not torch.allclose(raw, last, atol=1e-2)
    with torch.no_grad():
        assert torch.equal(backbone.norm(raw[None])[0], last)


def test_taps_come_in_the_order_asked_for_and_only_those(backbone: Backbone) -> None:
    captured = extract(backbone, IDS, [3, 1])
    assert list(captured.taps) == [3, 1]
    assert captured.final.shape == (len(IDS), 32)
    assert torch.equal(captured.taps[1], _tuple(backbone)[1])


def test_no_hook_stays_behind_even_after_a_failure(backbone: Backbone) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("0 active drivers")

    def hooks() -> list[int]:
        return [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in backbone.layers]

    before = hooks()
    extract(backbone, IDS, [0, 2])
    breaking = backbone.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(StageError, match="forward failed on cpu with 7 tokens: RuntimeError: 0 active drivers"):
        extract(backbone, IDS, [0, 2])
    breaking.remove()
    assert hooks() == before


def test_a_longer_sequence_leaves_earlier_rows_as_they_are(backbone: Backbone) -> None:
    short, long = extract(backbone, IDS[:4], [2]).taps[2], extract(backbone, IDS, [2]).taps[2]
    assert torch.allclose(short, long[:4], atol=1e-5)
    assert not torch.allclose(short, long[1:5], atol=1e-2)


@pytest.mark.parametrize("taps", [[], [1, 1], [-1], [5]])
def test_impossible_taps_are_refused(taps: list[int]) -> None:
    with pytest.raises(ConfigError, match="do not fit a target of 4 layers"):
        extract(backbone_of(tiny_model("llama")), IDS, taps)


def test_a_sequence_that_does_not_fit_is_refused() -> None:
    backbone = backbone_of(tiny_model("llama"))
    assert len(extract(backbone, [1] * 64, [1]).taps[1]) == 64
    for count in (0, 65):
        with pytest.raises(InputError, match=f"sequence of {count} tokens does not fit the target's 64"):
            extract(backbone, [1] * count, [1])
    assert len(extract(backbone, [39], [1]).taps[1]) == 1
    for token in (40, -1):
        with pytest.raises(InputError, match=f"token id {token} has no row in the target's embedding of 40"):
            extract(backbone, [3, token], [1])


class _Skipping(nn.Module):
    """A decoder that runs only its first two layers, as if the others' hooks never fired."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.inner = decoder

    def forward(self, **kwargs: Any) -> Any:
        self.inner.config.num_hidden_layers = 2
        return self.inner(**kwargs)


def test_a_layer_that_was_not_captured_is_an_error_not_an_absence() -> None:
    backbone = backbone_of(tiny_model("llama"))
    with pytest.raises(StageError, match=r"Tap 3 gave tensors of shape \[\]"):
        extract(replace(backbone, decoder=_Skipping(backbone.decoder)), IDS, [1, 3])


def test_bfloat16_states_stay_bfloat16() -> None:
    captured = extract(backbone_of(tiny_model("qwen3_5_text").to(torch.bfloat16)), IDS, [0, 4])
    assert {tensor.dtype for tensor in captured.taps.values()} == {torch.bfloat16}


def test_right_padding_under_a_mask_changes_no_row(backbone: Backbone) -> None:
    sequences = [IDS, IDS[:2], (1, 2, 3, 4), (7,)]
    padded = extract_padded(backbone, sequences, [0, 2, 4])
    for found, token_ids in zip(padded, sequences, strict=True):
        alone = extract(backbone, token_ids, [0, 2, 4])
        assert [found.taps[k].shape for k in (0, 2, 4)] == [(len(token_ids), 32)] * 3
        for k in (0, 2, 4):
            assert torch.allclose(found.taps[k], alone.taps[k], rtol=1e-4, atol=1e-4)
        assert torch.allclose(found.final, alone.final, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(padded[1].taps[2], padded[0].taps[2][1:3], atol=1e-2)


def test_padding_on_the_left_would_change_rows() -> None:
    """Why it is not done: without position ids and a mask each row sees the padding before it."""
    backbone = backbone_of(tiny_model("qwen3_5_text"))
    left = extract(backbone, (0, 0, 0, *IDS[:2]), [4]).taps[4][3:]
    assert not torch.allclose(left, extract(backbone, IDS[:2], [4]).taps[4], atol=1e-2)
