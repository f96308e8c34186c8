"""Other renderings of a prompt, worked out by hand for a small template; and the control that keeps them honest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jinja2 import TemplateError

from dflash_model.target.backbone import backbone_of
from dflash_model.target.extraction import OpenTarget
from dflash_model.target.fidelity import SampleFidelity
from dflash_model.target.misplacements import COMPUTED_AGAIN, TEMPLATE
from dflash_model.target.references import Reference
from dflash_model.target.room import Choice
from dflash_model.target.tables import PLAIN, Tables
from dflash_model.target.template_variants import MOST_SAMPLES, prompt_variants, try_templates
from tests.tiny_targets import tiny_model

WORDS = {"<u>": 1, "</u>": 2, "<a>": 3, "<think>": 4, "</think>": 5, "x": 6}


class _Tokenizer:
    """A word a token; <u> words </u> <a>, and a closed thinking part where thinking is off. Ids from 10 on are the user's."""

    chat_template: str | None = "a template"
    bos_token_id: int | None = None

    def __init__(self, *, thinking: bool = True) -> None:
        self._thinking = thinking

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [WORDS[word] for word in text.split()]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool, enable_thinking: bool = True
    ) -> str:
        assert not tokenize
        if not self._thinking and not enable_thinking:
            raise TemplateError("unknown option")
        tail = " <a>" + ("" if enable_thinking else " <think> </think>") if add_generation_prompt else ""
        return f"<u> {messages[0]['content']} </u>{tail}"


def test_thinking_modes_the_bare_words_and_a_missing_answers_start_are_tried() -> None:
    assert prompt_variants((1, 10, 11, 2, 3), _Tokenizer()) == (
        (1, 10, 11, 2, 3, 4, 5),
        (1, 10, 11, 2),
        (10, 11),
    )
    assert prompt_variants((1, 10, 11, 2, 3, 4, 5), _Tokenizer())[0] == (1, 10, 11, 2, 3)
    assert prompt_variants((10, 11), _Tokenizer())[:2] == ((1, 10, 11, 2, 3), (1, 10, 11, 2, 3, 4, 5))


def test_a_template_that_refuses_an_option_is_left_with_the_others() -> None:
    assert prompt_variants((1, 10, 2, 3), _Tokenizer(thinking=False)) == ((1, 10, 2), (10,))


def test_bos_is_added_or_dropped() -> None:
    tokenizer = _Tokenizer()
    tokenizer.chat_template, tokenizer.bos_token_id = None, 9
    assert prompt_variants((10, 11), tokenizer) == ((9, 10, 11),)
    assert prompt_variants((9, 10, 11), tokenizer) == ((10, 11),)
    tokenizer.bos_token_id = None
    assert prompt_variants((10, 11), tokenizer) == ()


@pytest.fixture(scope="module")
def target() -> OpenTarget:
    return OpenTarget(backbone=backbone_of(tiny_model("llama")), choice=Choice(mode="full", reason=""))


@pytest.fixture(scope="module")
def tables(target: OpenTarget) -> Tables:
    model: Any = target.backbone.model
    weights = {"embed": model.model.embed_tokens.weight, "head": model.lm_head.weight, "norm": model.model.norm.weight}
    return Tables(
        **{name: weight.detach() for name, weight in weights.items()},
        norm_form=PLAIN, rms_norm_eps=model.config.rms_norm_eps, embedding_scale=1.0, logit_softcap=None, tied=False, facts={},
    )  # fmt: skip


def _greedy(target: OpenTarget, prompt: tuple[int, ...], count: int = 6) -> tuple[int, ...]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(target.backbone.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def _reference(name: str, prompt: tuple[int, ...], completion: tuple[int, ...]) -> Reference:
    return Reference(
        sample_id=name, prompt_ids=prompt, completion_ids=completion, overshoot_ids=(), finish="length", logprobs=None, engine="x"
    )


def _bad(name: str) -> SampleFidelity:
    return SampleFidelity(sample_id=name, n=6, agreeing=0, gaps_nats=(1.0,) * 6, logprobs=(-1.0,) * 6)


def test_the_rendering_that_the_completion_was_made_from_is_found(target: OpenTarget, tables: Tables) -> None:
    asked, meant = (1, 10, 11, 12, 2, 3), (10, 11, 12)
    reference = _reference("a", asked, _greedy(target, meant))
    (found,) = try_templates(target, [_bad("a")], {"a": reference}, tokenizer=_Tokenizer(), tables=tables, below=0.9)
    assert found.alternatives[TEMPLATE].agreeing == 6
    assert found.alternatives[COMPUTED_AGAIN].agreeing < 6


def test_where_the_prompt_itself_agrees_no_rendering_is_blamed(target: OpenTarget, tables: Tables) -> None:
    asked = (1, 10, 11, 12, 2, 3)
    reference = _reference("a", asked, _greedy(target, asked))
    (found,) = try_templates(target, [_bad("a")], {"a": reference}, tokenizer=_Tokenizer(), tables=tables, below=0.9)
    assert {name: alternative.agreeing for name, alternative in found.alternatives.items()} == {COMPUTED_AGAIN: 6}


def test_only_a_few_bad_samples_cost_forwards(target: OpenTarget, tables: Tables) -> None:
    names = ["good", "none", *"abcde"]
    references = {name: _reference(name, (1, 10, 2, 3), (5, 6, 7, 8, 9, 10)) for name in names}
    samples = [_bad(name) for name in names]
    samples[0] = SampleFidelity(sample_id="good", n=6, agreeing=6)
    samples[1] = SampleFidelity(sample_id="none", n=0)
    before = target.forwards
    found = try_templates(target, samples, references, tokenizer=_Tokenizer(), tables=tables, below=0.9)
    assert [bool(sample.alternatives) for sample in found] == [False, False, True, True, True, False, False]
    # The prompt itself, thinking off, no answer's start, the bare words.
    assert target.forwards - before == MOST_SAMPLES * 4
