"""In-process references equal a naive argmax loop, whatever the target's own generation config says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dflash_model.errors import InputError
from dflash_model.target.backbone import Backbone, backbone_of, load_backbone
from dflash_model.target.greedy import generate_reference
from dflash_model.target.prompts import RenderedPrompt, load_tokenizer, read_prompts, render
from tests.tiny_targets import DEMO_PROMPTS, DEMO_TARGET, tiny_model


@pytest.fixture(scope="module")
def demo() -> Backbone:
    return load_backbone(DEMO_TARGET, dtype="float32")


@pytest.fixture(scope="module")
def prompts() -> list[RenderedPrompt]:
    chosen = [prompt for prompt in read_prompts(DEMO_PROMPTS) if prompt.id in ("code-1", "count-1", "unlike-1")]
    return render(chosen, load_tokenizer(DEMO_TARGET), thinking=None, max_prompt_tokens=100)


def _prompt(*token_ids: int) -> RenderedPrompt:
    return RenderedPrompt(id="p", category=None, token_ids=token_ids, text="")


@torch.no_grad()
def _naive(backbone: Backbone, token_ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """`count` greedy tokens and their log-probabilities, with one whole forward a token and no cache."""
    tokens, logprobs = list(token_ids), []
    for _ in range(count):
        last = backbone.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
        tokens.append(int(last.argmax()))
        logprobs.append(float(last.max()))
    return tokens[len(token_ids) :], logprobs


@pytest.mark.parametrize("index", range(3), ids=["code-1", "count-1", "unlike-1"])
def test_a_reference_of_the_demo_target_equals_the_naive_loop(demo: Backbone, prompts: list[RenderedPrompt], index: int) -> None:
    prompt = prompts[index]
    reference = generate_reference(demo, prompt, stop_ids=(2,), max_new_tokens=30, overshoot_tokens=4)
    length = len(reference.completion_ids)
    tokens, logprobs = _naive(demo, prompt.token_ids, length + 4)
    assert reference.completion_ids + reference.overshoot_ids == tuple(tokens)
    assert reference.logprobs == pytest.approx(logprobs[:length], abs=1e-5)
    assert reference.finish == ("length" if length == 30 else "stop")
    assert (2 in tokens[: length - 1], tokens[length - 1] == 2) == (False, reference.stopped)
    assert (reference.sample_id, reference.prompt_ids) == (prompt.id, prompt.token_ids)


def test_the_three_demo_answers_cover_both_ends(demo: Backbone, prompts: list[RenderedPrompt]) -> None:
    finishes = [generate_reference(demo, p, stop_ids=(2,), max_new_tokens=30, overshoot_tokens=0).finish for p in prompts]
    assert finishes == ["stop", "length", "stop"]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_5_text"])
def test_a_stop_token_on_the_last_place_counts_as_stop_and_one_later_as_length(kind: str) -> None:
    backbone = backbone_of(tiny_model(kind))
    tokens, _ = _naive(backbone, (7, 11, 13), 12)
    place = next(i for i in range(2, 12) if tokens[i] not in tokens[:i])
    for limit, finish, length in ((place + 3, "stop", place + 1), (place + 1, "stop", place + 1), (place, "length", place)):
        reference = generate_reference(
            backbone, _prompt(7, 11, 13), stop_ids=(tokens[place],), max_new_tokens=limit, overshoot_tokens=2
        )
        assert (reference.finish, len(reference.completion_ids)) == (finish, length)
        assert reference.completion_ids + reference.overshoot_ids == tuple(tokens[: length + 2])


def test_penalties_of_the_targets_own_generation_config_do_not_bend_a_reference(
    demo: Backbone, prompts: list[RenderedPrompt]
) -> None:
    def reference() -> Any:
        return generate_reference(demo, prompts[1], stop_ids=(2,), max_new_tokens=24, overshoot_tokens=0)

    clean, own = reference(), demo.model.generation_config
    own.repetition_penalty, own.suppress_tokens, own.min_new_tokens = 1.8, [clean.completion_ids[0]], 3
    try:
        bent = demo.model.generate(input_ids=torch.tensor([prompts[1].token_ids]), max_new_tokens=24, do_sample=False)
        assert tuple(bent[0, len(prompts[1].token_ids) :].tolist()) != clean.completion_ids
        assert reference() == clean
        assert demo.model.generation_config is own
    finally:
        own.repetition_penalty = own.suppress_tokens = own.min_new_tokens = None


def test_the_context_limit_is_checked_and_overshoot_ends_there() -> None:
    backbone = backbone_of(tiny_model("llama"))
    prompt = _prompt(*range(3, 13))
    reference = generate_reference(backbone, prompt, stop_ids=(10_000,), max_new_tokens=53, overshoot_tokens=8)
    assert (len(reference.completion_ids), len(reference.overshoot_ids)) == (53, 1)
    with pytest.raises(InputError, match=r"Prompt p has 10 tokens and 55 new ones are wanted; the target's context holds 64"):
        generate_reference(backbone, prompt, stop_ids=(10_000,), max_new_tokens=55, overshoot_tokens=0)


def test_nonsense_limits_are_a_callers_error(demo: Backbone) -> None:
    with pytest.raises(ValueError, match="max_new_tokens 0"):
        generate_reference(demo, _prompt(1), stop_ids=(2,), max_new_tokens=0, overshoot_tokens=0)
    with pytest.raises(ValueError, match="stop_ids"):
        generate_reference(demo, _prompt(1), stop_ids=(), max_new_tokens=1, overshoot_tokens=0)
