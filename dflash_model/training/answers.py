"""The target's own greedy answers to training prompts, many at once: what a drafter is trained on.

Prompts of one length share a batch, so that nothing is ever padded in front. These are training data; the references of
an evaluation are made one by one (`dflash_model/target/greedy.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch

from dflash_model.errors import InputError
from dflash_model.target.backbone import Backbone
from dflash_model.target.prompts import RenderedPrompt
from dflash_model.target.references import LENGTH, STOP, Reference

ENGINE = "batched greedy"
Progress = Callable[[int, int], None]


def answer_prompts(
    backbone: Backbone,
    prompts: Sequence[RenderedPrompt],
    *,
    stop_ids: Sequence[int],
    max_new_tokens: int,
    batch: int = 32,
    on_progress: Progress | None = None,
) -> list[Reference]:
    """One reference a prompt, in the prompts' order: up to `max_new_tokens`, ended by the first stop token.

    Raises InputError where a prompt and its answer do not fit the target.
    """
    answers: dict[str, Reference] = {}
    for group in _same_length(prompts, batch):
        length = len(group[0].token_ids)
        if length + max_new_tokens > backbone.max_positions:
            raise InputError(
                f"Prompt {group[0].id} has {length} tokens; with {max_new_tokens} new ones the target's "
                f"{backbone.max_positions} positions are too few.",
                "Shorten the prompt or ask for fewer new tokens.",
            )
        for prompt, completion in zip(group, _generate(backbone, group, set(stop_ids), max_new_tokens), strict=True):
            answers[prompt.id] = _reference(prompt, completion, set(stop_ids))
        if on_progress:
            on_progress(len(answers), len(prompts))
    return [answers[prompt.id] for prompt in prompts]


def _same_length(prompts: Sequence[RenderedPrompt], batch: int) -> Iterator[list[RenderedPrompt]]:
    for _, group in groupby(sorted(prompts, key=lambda p: len(p.token_ids)), key=lambda p: len(p.token_ids)):
        members = list(group)
        yield from (members[start : start + batch] for start in range(0, len(members), batch))


def _generate(backbone: Backbone, group: Sequence[RenderedPrompt], stops: set[int], limit: int) -> list[list[int]]:
    for prompt in group:
        backbone.check_tokens(prompt.token_ids)
    fed = torch.tensor([list(prompt.token_ids) for prompt in group], device=backbone.device)
    completions: list[list[int]] = [[] for _ in group]
    done = [False] * len(group)
    cache = None
    with torch.no_grad():
        for _ in range(limit):
            out = backbone.model(input_ids=fed, cache=cache, use_cache=True, logits_to_keep=1)
            cache = out.cache
            fed = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            for index, token in enumerate(fed[:, 0].tolist()):
                if not done[index]:
                    completions[index].append(token)
                    done[index] = token in stops
            if all(done):
                break
    return completions


def _reference(prompt: RenderedPrompt, completion: list[int], stops: set[int]) -> Reference:
    return Reference(
        sample_id=prompt.id,
        prompt_ids=tuple(prompt.token_ids),
        completion_ids=tuple(completion),
        overshoot_ids=(),
        finish=STOP if completion[-1] in stops else LENGTH,
        logprobs=None,
        engine=ENGINE,
    )
