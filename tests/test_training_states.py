"""Target states of a training batch: those of each row alone, and what each fault of this stage changes."""

from __future__ import annotations

import pytest
import torch

from dflash_model.errors import ConfigError
from dflash_model.target.backbone import Backbone, backbone_of
from dflash_model.target.hidden_states import extract
from dflash_model.training.answers import answer_prompts
from dflash_model.training.faults import FAULTS, NO_FAULT, Fault
from dflash_model.training.target_states import TargetForward, TargetRows
from tests.tiny_targets import tiny_model

LENGTHS = (5, 9, 12)
TAPS = (0, 2, 3)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 40, (3, 12), generator=generator)
    lengths = torch.tensor(LENGTHS)
    return tokens.where(torch.arange(12) < lengths[:, None], 0), lengths


def rows_of(backbone: Backbone, fault: Fault = NO_FAULT, noise: torch.Tensor | None = None) -> TargetRows:
    tokens, lengths = batch()
    return TargetForward(backbone, TAPS, pad_id=0, fault=fault)(tokens, lengths, noise=noise)


def alone(backbone: Backbone, taps: tuple[int, ...] = TAPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per row, by the evaluation's way: states [n, T * H] and final [n, H]."""
    tokens, _ = batch()
    found = [extract(backbone, tokens[row, :length].tolist(), taps) for row, length in enumerate(LENGTHS)]
    return [(torch.cat([each.taps[k] for k in taps], dim=-1), each.final) for each in found]


def furthest(given: torch.Tensor, wanted: list[torch.Tensor]) -> float:
    return max(float((given[row, : len(one)] - one).abs().max()) for row, one in enumerate(wanted))


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_text"])
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return backbone_of(tiny_model(request.param))


def test_a_row_of_a_batch_has_the_states_of_the_row_alone(backbone: Backbone) -> None:
    rows, wanted = rows_of(backbone), alone(backbone)
    assert furthest(rows.states, [states for states, _ in wanted]) < 1e-4
    assert furthest(rows.final, [final for _, final in wanted]) < 1e-4


def test_padding_in_front_without_a_mask_garbles_all_rows_but_the_full_one(backbone: Backbone) -> None:
    rows, wanted = rows_of(backbone, FAULTS["padded_states"]), alone(backbone)
    for row, (states, _) in enumerate(wanted):
        off = float((rows.states[row, : len(states)] - states).abs().max())
        assert (off > 1e-2) == (LENGTHS[row] < 12), (row, off)


def test_the_verifiers_layer_can_take_the_last_taps_place(backbone: Backbone) -> None:
    rows, right = rows_of(backbone, FAULTS["verifier_layer_in_fc"]), rows_of(backbone)
    assert torch.equal(rows.states[..., 64:], right.final)
    assert torch.equal(rows.states[..., :64], right.states[..., :64])


def test_noise_stays_off_the_verifiers_state_unless_that_is_the_fault(backbone: Backbone) -> None:
    noise = torch.rand(3, 12, 96, generator=torch.Generator().manual_seed(1)) * 2 - 1
    clean, noisy = rows_of(backbone), rows_of(backbone, noise=0.5 * noise)
    assert torch.equal(noisy.final, clean.final)
    for tap in range(3):
        part = slice(32 * tap, 32 * tap + 32)
        scale = clean.states[..., part].pow(2).mean().sqrt()
        assert torch.allclose(noisy.states[..., part] - clean.states[..., part], 0.5 * noise[..., part] * scale, atol=1e-4)
    faulty = rows_of(backbone, FAULTS["noise_on_labels"], noise=0.5 * noise)
    assert float((faulty.final - clean.final).abs().max()) > 0.1


def test_taps_that_the_target_has_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="tap indices"):
        TargetForward(backbone_of(tiny_model("qwen3")), (2, 9), pad_id=0)


def test_batched_answers_equal_one_by_one_greedy_ones() -> None:
    from dflash_model.target.greedy import generate_reference
    from dflash_model.target.prompts import RenderedPrompt

    target = backbone_of(tiny_model("qwen3_5_text"))
    prompts = [RenderedPrompt(id=f"p{n}", category=None, token_ids=tuple(range(4 + n, 9 + n + n % 2)), text="") for n in range(5)]
    answers = answer_prompts(target, prompts, stop_ids=[2, 17], max_new_tokens=10, batch=2)
    for prompt, answer in zip(prompts, answers, strict=True):
        one = generate_reference(target, prompt, stop_ids=[2, 17], max_new_tokens=10, overshoot_tokens=0)
        assert (answer.sample_id, answer.completion_ids, answer.finish) == (prompt.id, one.completion_ids, one.finish)
