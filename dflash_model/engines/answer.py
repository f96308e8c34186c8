"""One completion as an engine tells it, and what must be true of it before it may become a reference.

The pitfalls that are met here: answers that start with the prompt's tail, that lack the stop token, that stop for a reason
of the server's own, or that were cut before the limit. A sample that cannot be told exactly is a `Refusal`, not a guess.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_model.errors import StageError
from dflash_model.served import Served
from dflash_model.target.prompts import RenderedPrompt
from dflash_model.target.references import IDS, LENGTH, STOP

log = logging.getLogger(__name__)

SMALL_POSITIVE = 1e-3
"""Log-probabilities up to this are taken for 0: some kernels round above it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A completion that holds."""

    token_ids: tuple[int, ...]
    """The completion, its stop token included."""

    finish: str
    """STOP or LENGTH."""

    logprobs: tuple[float, ...] | None
    """Natural log-probability of each token as the server tells it; None where it does not."""

    past_end: tuple[int, ...] = ()
    """Greedy tokens that the server gave beyond our stop token."""

    served: Served | None = None
    """Counters of the server's own drafter."""

    token_source: str = IDS
    """IDS or TEXT, as in Reference."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A completion that cannot be told exactly; the sample is left out, and the reason said."""

    reason: str
    """One phrase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What a server said of one completion, before any check."""

    token_ids: Any
    """Its list of ids."""

    finish: str | None
    """Its word for the end."""

    matched: Any = None
    """The stop token (or string) that it names, where it names one."""

    counted: int | None = None
    """Its count of completion tokens."""

    logprobs: Sequence[float | None] | None = None
    """Its log-probabilities."""


class Engine(Protocol):
    """One protocol, spoken to one server."""

    name: str
    """As in parameters: "sglang", "openai", "openai-text"."""

    can_continue: bool
    """Whether it can be asked to go on past a stop token from ids; without that there is no overshoot."""

    def identity(self) -> dict[str, Any]:
        """What the server says of its model. Raises EvalError."""
        ...

    def ask(self, prompt: RenderedPrompt, *, max_new_tokens: int) -> Answer | Refusal:
        """The greedy completion of a prompt, ended naturally. Raises EvalError."""
        ...

    def go_on(self, token_ids: Sequence[int], *, count: int, counted_as: str) -> Answer:
        """`count` greedy tokens after `token_ids`, stop tokens ignored. Raises EvalError."""
        ...


def check_ids(
    told: Told, *, prompt_ids: Sequence[int], vocab_size: int, who: str, sample: str
) -> tuple[list[int], list[float] | None]:
    """The completion's ids and log-probabilities, those of a prompt's tail before them taken away.

    Raises StageError where the ids are none, are foreign, or do not add up with the server's own count.
    """
    ids, logprobs = told.token_ids, _logprobs(told, who=who, sample=sample)
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise StageError(
            f"{who} gave no token ids for prompt {sample}.",
            "Use an engine version that returns them (vLLM >= 0.10.2, SGLang), or --references-from openai-text.",
        )
    foreign = next((token for token in ids if token >= vocab_size), None)
    if foreign is not None:
        raise StageError(
            f"{who} gave the token id {foreign} for prompt {sample}; the target's vocabulary ends at {vocab_size - 1}.",
            "It serves another model or tokenizer: let it serve the target.",
        )
    extra = 0 if told.counted is None else len(ids) - told.counted
    if extra > 0 and list(prompt_ids[-extra:]) == ids[:extra]:
        log.warning("%s put the prompt's last %d tokens before the answer to %s; they are taken away", who, extra, sample)
        ids, logprobs = ids[extra:], logprobs[extra:] if logprobs is not None and len(logprobs) == len(ids) else logprobs
    elif extra == -1 and told.finish == STOP and type(told.matched) is int:
        ids = [*ids, told.matched]
        logprobs = logprobs if logprobs is not None and len(logprobs) == len(ids) else None
    elif extra:
        raise StageError(
            f"{who} gave {len(ids)} token ids for prompt {sample} and counts {told.counted}.",
            "Update the engine: its ids cannot be trusted.",
        )
    if logprobs is not None and len(logprobs) != len(ids):
        raise StageError(
            f"{who} gave {len(logprobs)} log-probabilities for {len(ids)} tokens of prompt {sample}.", "Update the engine."
        )
    return ids, logprobs


def settle(
    told: Told,
    *,
    prompt_ids: Sequence[int],
    stop_ids: Sequence[int],
    max_new_tokens: int,
    vocab_size: int,
    who: str,
    sample: str,
    served: Served | None = None,
) -> Answer:
    """The completion up to and including its first stop token, or the whole of it at the limit. Raises StageError."""
    ids, logprobs = check_ids(told, prompt_ids=prompt_ids, vocab_size=vocab_size, who=who, sample=sample)
    past_end: list[int] = []
    stop_at = next((place for place, token in enumerate(ids) if token in stop_ids), None)
    if stop_at is None and told.finish == STOP and type(told.matched) is int and told.matched in stop_ids:
        ids, logprobs, stop_at = [*ids, told.matched], None, len(ids)
    if len(ids) > max_new_tokens:
        raise StageError(
            f"{who} gave {len(ids)} tokens for prompt {sample}, of {max_new_tokens} asked for.", "Update the engine."
        )
    if stop_at is not None:
        ids, past_end = ids[: stop_at + 1], ids[stop_at + 1 :]
        logprobs = None if logprobs is None else logprobs[: stop_at + 1]
    elif told.finish == STOP:
        by = f" at {told.matched!r}" if told.matched is not None else ""
        raise StageError(
            f"{who} stopped the answer to prompt {sample}{by}, which is no stop token of the target.",
            "Start it without stop words of its own, with the target's own tokenizer and generation config.",
        )
    elif told.finish != LENGTH or len(ids) != max_new_tokens:
        raise StageError(
            f"{who} ended the answer to prompt {sample} after {len(ids)} of {max_new_tokens} tokens without a stop token "
            f"({told.finish!r}).",
            "Give the server a context that holds prompt and answer, or ask for fewer new tokens.",
        )
    return Answer(
        token_ids=tuple(ids),
        finish=STOP if stop_at is not None else LENGTH,
        logprobs=None if logprobs is None else tuple(logprobs),
        past_end=tuple(past_end),
        served=served,
    )


def same_text(said: Any, token_ids: Sequence[int], tokenizer: Any) -> bool:
    """Whether a server's text is what the target's own tokenizer makes of its ids, with or without the last (the stop token).

    White space and cut characters are set aside: engines differ there.
    """
    if not isinstance(said, str):
        return True
    whole = list(token_ids)
    ours = (tokenizer.decode(ids, skip_special_tokens=skip) for ids in (whole, whole[:-1]) for skip in (True, False))
    return _plain(said) in {_plain(text) for text in ours}


def check_text(said: Any, token_ids: Sequence[int], tokenizer: Any, *, who: str, sample: str) -> None:
    """Raises StageError where the server's own text shows that its tokenizer is another one."""
    if not same_text(said, token_ids, tokenizer):
        ours = tokenizer.decode(list(token_ids), skip_special_tokens=True)
        raise StageError(
            f"{who} reads its own tokens for prompt {sample} as {said[:40]!r}; the target's tokenizer reads {ours[:40]!r}.",
            "It serves another model or tokenizer: let it serve the target.",
        )


def _plain(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())


def _logprobs(told: Told, *, who: str, sample: str) -> list[float] | None:
    """The log-probabilities where every token has one; StageError for values that are none."""
    values = told.logprobs
    if values is None or not values or any(value is None for value in values):
        return None
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) != len(values) or not all(math.isfinite(value) and value <= SMALL_POSITIVE for value in numbers):
        raise StageError(f"{who} gave log-probabilities for prompt {sample} that are none.", "Update the engine.")
    return [min(0.0, value) for value in numbers]
