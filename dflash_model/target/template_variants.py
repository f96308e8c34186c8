"""Other ways in which a prompt may have been rendered, for a gate that failed: was the completion made from one of them?

A server that renders messages itself may use another thinking mode, add a BOS token, or leave the template out. What
stands round the user's words is read off the tokenizer's own template, so nothing here knows a model's markers.

Shapes: token ids are tuples; n completion tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from dflash_model.target.extraction import OpenTarget
from dflash_model.target.fidelity import SampleFidelity
from dflash_model.target.misplacements import COMPUTED_AGAIN, TEMPLATE, Alternative, alternative_of
from dflash_model.target.references import Reference
from dflash_model.target.tables import Tables

MOST_SAMPLES = 3
"""Suspect samples that are tried; each variant of each costs a forward."""
_WORDS = "x"


def prompt_variants(prompt_ids: Sequence[int], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Other renderings of one prompt, without `prompt_ids` itself; () for a tokenizer that shows none."""
    ids = tuple(prompt_ids)
    variants: list[tuple[int, ...]] = []
    bos = tokenizer.bos_token_id
    if bos is not None:
        variants.append(ids[1:] if ids[0] == bos else (bos, *ids))
    wraps = _wraps(tokenizer)
    own = next((wrap for wrap in wraps if _wrapped_by(ids, wrap)), None)
    inner = ids if own is None else ids[len(own[0]) : len(ids) - len(own[1])]
    variants += [(*head, *inner, *tail) for head, tail in wraps]
    if own is not None and own[0]:
        variants.append(inner)
    return tuple(dict.fromkeys(variant for variant in variants if variant and variant != ids))


def try_templates(
    target: OpenTarget,
    samples: Iterable[SampleFidelity],
    references: Mapping[str, Reference],
    *,
    tokenizer: Any,
    tables: Tables,
    below: float,
) -> list[SampleFidelity]:
    """The samples, the first few that agree on less than `below` with what the best other rendering would give.

    Raises what an extraction raises.
    """
    tried: list[SampleFidelity] = []
    count = 0
    for sample in samples:
        if sample.agree is None or sample.agree >= below or count == MOST_SAMPLES:
            tried.append(sample)
            continue
        count += 1
        more = _renderings(target, references[sample.sample_id], tokenizer, tables)
        tried.append(replace(sample, alternatives=sample.alternatives | more))
    return tried


def _renderings(target: OpenTarget, reference: Reference, tokenizer: Any, tables: Tables) -> dict[str, Alternative]:
    """What the prompt as it is measures, computed here once more, and the rendering under which most tokens agree.

    The first is the control: where it agrees, the rows were wrong and not the prompt, and every rendering would seem to help.
    """
    room = target.backbone.max_positions - len(reference.completion_ids)
    prompts = [reference.prompt_ids, *(ids for ids in prompt_variants(reference.prompt_ids, tokenizer) if len(ids) <= room)]
    sequences = [(*ids, *reference.completion_ids) for ids in prompts]
    found = []
    for ids, captured in zip(prompts, target.extract(sequences, [target.backbone.num_layers]), strict=True):
        rows = captured.final[len(ids) - 1 : -1]
        found.append(alternative_of(rows, reference.completion_ids, reference.logprobs, tables, normed=False))
    control, *others = found
    best = max(others, key=lambda alternative: alternative.agreeing, default=control)
    better = best.agreeing > control.agreeing
    return {COMPUTED_AGAIN: control} | ({TEMPLATE: best} if better else {})


def _wraps(tokenizer: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ids before, ids after the words of a lone user message) of each thinking mode, with and without the answer's start."""
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if not tokenizer.chat_template:
        return found
    words = tuple(tokenizer(_WORDS, add_special_tokens=False)["input_ids"])
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"add_generation_prompt": False}):
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": _WORDS}], tokenize=False, **({"add_generation_prompt": True} | options)
            )
        except (TemplateError, ValueError, TypeError):
            continue
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        places = [i for i in range(len(ids)) if ids[i : i + len(words)] == words]
        if places:
            # The user's words come last before the tail: a system prompt may hold the same ones.
            found.append((ids[: places[-1]], ids[places[-1] + len(words) :]))
    return list(dict.fromkeys(found))


def _wrapped_by(ids: tuple[int, ...], wrap: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    head, tail = wrap
    longer = len(ids) > len(head) + len(tail)
    return longer and ids[: len(head)] == head and ids[len(ids) - len(tail) :] == tail
