"""Layer by layer against our own states: what differs is found, inner layers too, and explained where it can be."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from dflash_model.errors import NotEvaluable
from dflash_model.target.backbone import backbone_of
from dflash_model.target.engine_check import check_engine_states, match_layers
from dflash_model.target.hidden_states import extract
from tests.tiny_targets import tiny_model

IDS = (5, 9, 14, 3, 22, 31, 8, 17, 4, 4, 1)
TAPS = (1, 2, 4)
TOLERANCE = 5e-2


@pytest.fixture(scope="module")
def ours() -> list[torch.Tensor]:
    return list(extract(backbone_of(tiny_model("qwen3_5_text")), IDS, range(5)).taps.values())


@pytest.fixture(scope="module")
def normed(ours: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        rows: torch.Tensor = backbone_of(tiny_model("qwen3_5_text")).norm(ours[4][None])[0]
    return rows


def _stack(ours: list[torch.Tensor], taps: tuple[int, ...] = TAPS) -> torch.Tensor:
    return torch.stack([ours[tap] for tap in taps], dim=1)


def _check(states: torch.Tensor, ours: list[torch.Tensor], normed: torch.Tensor, taps: tuple[int, ...] = TAPS) -> str:
    return check_engine_states(states, taps, ours, normed=normed, tolerance=TOLERANCE, sample_id="a").detail


def test_the_same_states_and_rounded_ones_are_accepted(ours: list[torch.Tensor], normed: torch.Tensor) -> None:
    assert "the farthest is tap 1: 0, tolerance 0.05" in _check(_stack(ours), ours, normed)
    rounded = _stack(ours).to(torch.bfloat16)
    assert "3 layers of sample a" in _check(rounded, ours, normed)
    assert 1e-4 < max(match.distance for match in match_layers(rounded, TAPS, ours)) < 1e-2


def _noisy(ours: list[torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
    states = _stack(ours)
    generator = torch.Generator().manual_seed(0)
    states[:, 1] += 0.1 * states[:, 1].std() * torch.randn(states[:, 1].shape, generator=generator)
    return states


def _normed_last(ours: list[torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
    return torch.stack([ours[1], ours[2], normed], dim=1)


WRONG: dict[str, tuple[Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor], str]] = {
    "one too low": (lambda ours, _: _stack(ours, (0, 1, 3)), "every layer is 1 too low: the engine gave taps \\[0, 1, 3\\]"),
    "one too high": (lambda ours, _: _stack(ours, (2, 3, 4))[:, :2], "every layer is 1 too high"),
    "other order": (lambda ours, _: _stack(ours, (2, 1, 4)), "another order: \\[2, 1, 4\\]"),
    "one other layer": (lambda ours, _: _stack(ours, (1, 3, 4)), "the engine gave taps \\[1, 3, 4\\], not \\[1, 2, 4\\]"),
    "normed": (_normed_last, "the last layer has passed the final norm"),
    "late": (lambda ours, _: torch.cat([_stack(ours)[:1], _stack(ours)[:-1]]), "one place late"),
    "early": (lambda ours, _: torch.cat([_stack(ours)[1:], _stack(ours)[-1:]]), "one place early"),
    "noise": (_noisy, "taps \\[2\\] are like none of ours"),
    "another prompt": (lambda ours, _: _stack(ours).flip(0), "taps \\[1, 2, 4\\] are like none of ours"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_is_refused_and_explained(name: str, ours: list[torch.Tensor], normed: torch.Tensor) -> None:
    make, cause = WRONG[name]
    states = make(ours, normed)
    with pytest.raises(NotEvaluable, match="states of a are not ours") as caught:
        _check(states, ours, normed, TAPS[: states.shape[1]])
    assert re.search(cause, caught.value.fix), caught.value.fix


def test_noise_on_an_inner_layer_leaves_the_last_one_as_it_is(ours: list[torch.Tensor], normed: torch.Tensor) -> None:
    """So the gate, which sees the last layer only, could not notice it."""
    assert torch.equal(_noisy(ours, normed)[:, 2], ours[4])
