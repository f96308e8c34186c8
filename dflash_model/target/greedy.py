"""Greedy generation of references with transformers, in process.

The model's own generation_config is set aside while generating: `generate` fills every unset field of the config it is
given from there, so that a repetition penalty in the target's files would otherwise bend a "greedy" reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dflash_model.errors import InputError, StageError
from dflash_model.target.backbone import Backbone
from dflash_model.target.prompts import RenderedPrompt
from dflash_model.target.references import LENGTH, STOP, Reference

ENGINE = "transformers"


def generate_reference(
    backbone: Backbone, prompt: RenderedPrompt, *, stop_ids: Sequence[int], max_new_tokens: int, overshoot_tokens: int
) -> Reference:
    """The target's greedy answer to one prompt: up to `max_new_tokens`, ended by the first stop token, plus overshoot.

    The overshoot is the same greedy continuation with stop tokens ignored; it is shorter than asked for where the
    target's context ends. Raises InputError where prompt and answer do not fit the context, StageError where the
    forward fails.
    """
    if max_new_tokens < 1 or overshoot_tokens < 0 or not stop_ids:
        raise ValueError(f"max_new_tokens {max_new_tokens}, overshoot_tokens {overshoot_tokens}, stop_ids {list(stop_ids)}")
    room = backbone.max_positions - len(prompt.token_ids)
    if room < max_new_tokens:
        raise InputError(
            f"Prompt {prompt.id} has {len(prompt.token_ids)} tokens and {max_new_tokens} new ones are wanted; "
            f"the target's context holds {backbone.max_positions}.",
            "Shorten or remove the prompt, or ask for fewer new tokens.",
        )
    backbone.check_tokens(prompt.token_ids)
    tail = _Tail(len(prompt.token_ids), frozenset(stop_ids), max_new_tokens, overshoot_tokens)
    recorder = _LogprobRecorder()
    generated = _generate(backbone, prompt, tail, recorder, limit=min(room, max_new_tokens + overshoot_tokens))
    end = tail.completion_length(generated)
    return Reference(
        sample_id=prompt.id,
        prompt_ids=tuple(prompt.token_ids),
        completion_ids=tuple(generated[:end]),
        overshoot_ids=tuple(generated[end : end + overshoot_tokens]),
        finish=STOP if generated[end - 1] in tail.stop_ids else LENGTH,
        logprobs=tuple(recorder.logprobs[:end]),
        engine=ENGINE,
    )


class _LogprobRecorder:
    """A logits processor that changes nothing and keeps the best token's log-probability of each step, not the logits."""

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wide = scores[0].float()
        self.logprobs.append(min(0.0, float(wide.max() - torch.logsumexp(wide, dim=-1))))
        return scores


class _Tail:
    """A stopping criterion: `overshoot` tokens past the completion's end, which the first stop token or the limit sets."""

    def __init__(self, prompt_length: int, stop_ids: frozenset[int], max_new_tokens: int, overshoot: int) -> None:
        self.stop_ids = stop_ids
        self._prompt_length = prompt_length
        self._max_new_tokens = max_new_tokens
        self._overshoot = overshoot
        self._stop_at: int | None = None
        self._seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        for token in input_ids[0, self._prompt_length + self._seen :].tolist():
            self._seen += 1
            if token in self.stop_ids and self._stop_at is None:
                self._stop_at = self._seen
        end = min(self._stop_at or self._max_new_tokens, self._max_new_tokens)
        done = self._seen >= end + self._overshoot
        return torch.full((input_ids.shape[0],), done, dtype=torch.bool, device=input_ids.device)

    def completion_length(self, generated: Sequence[int]) -> int:
        """Tokens up to and including the first stop token, at most the limit."""
        stops = [i + 1 for i, token in enumerate(generated) if token in self.stop_ids]
        return min([*stops[:1], self._max_new_tokens])


def _generate(backbone: Backbone, prompt: RenderedPrompt, tail: _Tail, recorder: _LogprobRecorder, *, limit: int) -> list[int]:
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    ids_1N = torch.tensor([list(prompt.token_ids)], device=backbone.device)  # noqa: N806 - shape suffix
    make_config: Any = GenerationConfig
    try:
        with torch.no_grad(), _set_aside_generation_config(backbone.model, make_config()):
            output = backbone.model.generate(
                input_ids=ids_1N,
                attention_mask=torch.ones_like(ids_1N),
                generation_config=make_config(do_sample=False, max_new_tokens=limit),
                logits_processor=LogitsProcessorList([recorder]),
                stopping_criteria=StoppingCriteriaList([tail]),
            )
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as exc:
        raise StageError(
            f"Generating for prompt {prompt.id} failed on {backbone.device}: {type(exc).__name__}: {exc}.",
            "Out of memory: use a larger device. A kernel package without a GPU driver (fla on a CPU host): uninstall it there.",
        ) from exc
    generated: list[int] = output[0, len(prompt.token_ids) :].tolist()
    return generated


@contextmanager
def _set_aside_generation_config(model: Any, neutral: Any) -> Iterator[None]:
    own = model.generation_config
    model.generation_config = neutral
    try:
        yield
    finally:
        model.generation_config = own
