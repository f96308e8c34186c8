"""OpenAI-style /v1/completions, with token ids (vLLM and SGLang with `return_token_ids`) or with text only.

With ids the prompt goes as ids and `choices[0].token_ids` comes back. With text only the rendered prompt goes as text; the
answer's text is tokenised here and taken only where that decodes to the same text again and the server's own counts of
tokens agree. Nothing can be asked past a stop token then: no overshoot. The stop token itself is not told either; it is
taken to be the tokenizer's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_model.engines.answer import Answer, Refusal, Told, check_text, settle
from dflash_model.engines.client import JsonClient
from dflash_model.engines.greedy_request import PENALTIES
from dflash_model.errors import InputError, StageError
from dflash_model.served import Served, served_from
from dflash_model.target.prompts import RenderedPrompt
from dflash_model.target.references import LENGTH, STOP, TEXT

MODEL_FIELDS = ("id", "root", "parent", "max_model_len")
COMPLETIONS = "completions"


class _OpenAi:
    """What both forms share: who the server is, and which of its models is meant."""

    def __init__(self, client: JsonClient, tokenizer: Any, *, stop_ids: Sequence[int]) -> None:
        self._client, self._tokenizer, self._stop_ids = client, tokenizer, list(stop_ids)
        self._who = f"The server at {client.access.url}"
        self._model = client.access.model

    def identity(self) -> dict[str, Any]:
        """What /v1/models says of the model. Raises EvalError."""
        listed = self._client.get("/v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not all(isinstance(one, dict) and isinstance(one.get("id"), str) for one in models):
            raise InputError(f"{self._who} has no list of models at /v1/models.", "Give the address of an OpenAI-style server.")
        names = [one["id"] for one in models]
        if self._model is None and len(names) != 1:
            raise InputError(
                f"{self._who} serves {len(names)} models.",
                f"Name one of them (--server-model): {', '.join(names[:8]) or 'none'}.",
            )
        wanted = self._model or names[0]
        found = next((one for one in models if one["id"] == wanted), None)
        if found is None:
            raise InputError(f"{self._who} does not serve {wanted!r}.", f"It serves: {', '.join(names[:8]) or 'nothing'}.")
        self._model = wanted
        return {name: found[name] for name in MODEL_FIELDS if name in found}

    def _choice(self, question: dict[str, Any], *, sample: str, counted_as: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """(choices[0], the whole answer). Raises EvalError."""
        if self._model is None:
            self.identity()
        question = {"model": self._model, "temperature": 0.0, **question}
        said = self._client.post("/v1/completions", question, counted_as=counted_as)
        choices = said.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise StageError(
                f"{self._who} answered prompt {sample} without one choice.", "See whether it is an OpenAI-style server."
            )
        return choices[0], said


class OpenAiIds(_OpenAi):
    """Token ids in and out."""

    name = "openai"
    can_continue = True

    def ask(self, prompt: RenderedPrompt, *, max_new_tokens: int) -> Answer | Refusal:
        """The greedy completion of a prompt. Raises EvalError."""
        limits = {"max_tokens": max_new_tokens, "stop_token_ids": self._stop_ids}
        return self._ask(prompt.token_ids, limits, stop_ids=self._stop_ids, sample=prompt.id, counted_as=COMPLETIONS)

    def go_on(self, token_ids: Sequence[int], *, count: int, counted_as: str) -> Answer:
        """`count` greedy tokens after `token_ids`. Raises EvalError."""
        limits = {"max_tokens": count, "ignore_eos": True}
        return self._ask(token_ids, limits, stop_ids=(), sample=counted_as, counted_as=counted_as)

    def _ask(
        self, prompt_ids: Sequence[int], limits: dict[str, Any], *, stop_ids: Sequence[int], sample: str, counted_as: str
    ) -> Answer:
        question = {"prompt": list(prompt_ids), "return_token_ids": True, "logprobs": 1, "stream": False, **PENALTIES, **limits}
        choice, said = self._choice(question, sample=sample, counted_as=counted_as)
        echoed = choice.get("prompt_token_ids", said.get("prompt_token_ids"))
        if isinstance(echoed, list) and echoed != list(prompt_ids):
            raise StageError(
                f"{self._who} read prompt {sample} as other tokens than were given.",
                "Start it without truncation and without a template of its own.",
            )
        logprobs = choice.get("logprobs")
        matched = choice.get("stop_reason", choice.get("matched_stop"))
        told = Told(
            token_ids=choice.get("token_ids"),
            finish=choice.get("finish_reason"),
            matched=matched,
            counted=_usage(said, "completion_tokens"),
            logprobs=logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None,
        )
        answer = settle(
            told,
            prompt_ids=prompt_ids,
            stop_ids=stop_ids,
            max_new_tokens=limits["max_tokens"],
            vocab_size=len(self._tokenizer),
            who=self._who,
            sample=sample,
            served=_served(choice, said),
        )
        check_text(choice.get("text"), answer.token_ids + answer.past_end, self._tokenizer, who=self._who, sample=sample)
        return answer


class OpenAiText(_OpenAi):
    """Text in and out."""

    name = "openai-text"
    can_continue = False

    def ask(self, prompt: RenderedPrompt, *, max_new_tokens: int) -> Answer | Refusal:
        """The greedy completion of a prompt, or why its tokens cannot be told. Raises EvalError."""
        choice, said = self._choice(
            {"prompt": prompt.text, "max_tokens": max_new_tokens}, sample=prompt.id, counted_as=COMPLETIONS
        )
        text, finish = choice.get("text"), choice.get("finish_reason")
        if not isinstance(text, str) or finish not in (STOP, LENGTH):
            raise StageError(f"{self._who} answered prompt {prompt.id} without text or finish_reason.", "See its log.")
        read = _usage(said, "prompt_tokens")
        if read is not None and read != len(prompt.token_ids):
            return Refusal(
                reason=f"the server reads its prompt as {read} tokens, the target's tokenizer as {len(prompt.token_ids)}"
            )
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if self._tokenizer.decode(ids, skip_special_tokens=False) != text:
            return Refusal(reason="its text, tokenised and decoded again, is another one")
        return self._told(ids, finish, _usage(said, "completion_tokens"), max_new_tokens)

    def go_on(self, token_ids: Sequence[int], *, count: int, counted_as: str) -> Answer:
        """Never asked for: `can_continue` is False."""
        raise NotImplementedError

    def _told(self, ids: list[int], finish: str, counted: int | None, max_new_tokens: int) -> Answer | Refusal:
        """The completion, with the stop token that a text does not show."""
        unseen = (1 if finish == STOP else 0) if counted is None else counted - len(ids)
        if unseen not in (0, 1) or (unseen == 0 and counted is not None and finish == LENGTH and len(ids) != max_new_tokens):
            return Refusal(reason=f"the server counts {counted} tokens, its text has {len(ids)}")
        if counted is None and finish == LENGTH and len(ids) != max_new_tokens:
            return Refusal(reason=f"it ended by its limit of {max_new_tokens}, its text has {len(ids)} tokens")
        if any(token in self._stop_ids for token in ids):
            return Refusal(reason="its text holds a stop token")
        if unseen == 1 or finish == STOP:
            stop = self._tokenizer.eos_token_id
            ids = [*ids, stop if stop in self._stop_ids else self._stop_ids[0]]
            return Answer(token_ids=tuple(ids), finish=STOP, logprobs=None, token_source=TEXT)
        return Answer(token_ids=tuple(ids), finish=LENGTH, logprobs=None, token_source=TEXT)


def _usage(said: dict[str, Any], name: str) -> int | None:
    usage = said.get("usage")
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int else None


def _served(choice: dict[str, Any], said: dict[str, Any]) -> Served | None:
    """vLLM's `metrics.speculative_decoding`, or what SGLang puts into a choice's or the answer's own corner."""
    metrics, meta, corner = said.get("metrics"), choice.get("meta_info"), said.get("sglext")
    found: Any = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if found is None and isinstance(meta, dict):
        found = {name: value for name, value in meta.items() if name.startswith("spec_")}
    if found is None and isinstance(corner, dict):
        found = corner.get("spec_tokens_details")
    tokens = _usage(said, "completion_tokens")
    return served_from(found, tokens=tokens) if isinstance(found, dict) and tokens else None
