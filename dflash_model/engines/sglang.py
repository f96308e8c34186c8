"""SGLang's own protocol: POST /generate with input_ids, `output_ids` and `meta_info` back; who it is at /model_info.

Older servers know /get_model_info only. Log-probabilities come as [value, id, text] triples. Counters of a drafter stand
in `meta_info` under names that start with spec_.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_model.engines.answer import Answer, Refusal, Told, check_text, settle
from dflash_model.engines.client import JsonClient
from dflash_model.engines.greedy_request import PENALTIES
from dflash_model.errors import InputError, StageError
from dflash_model.served import served_from
from dflash_model.target.prompts import RenderedPrompt

INFO_PATHS = ("/model_info", "/get_model_info")
INFO_FIELDS = ("model_path", "tokenizer_path", "weight_version", "model_type", "architectures", "is_generation")
COMPLETIONS = "completions"


class Sglang:
    """One SGLang server."""

    name = "sglang"
    can_continue = True

    def __init__(self, client: JsonClient, tokenizer: Any, *, stop_ids: Sequence[int]) -> None:
        self._client, self._tokenizer, self._stop_ids = client, tokenizer, list(stop_ids)
        self._who = f"SGLang at {client.access.url}"
        self._info_path: str | None = None

    def identity(self) -> dict[str, Any]:
        """The telling fields of its model info. Raises EvalError."""
        for path in (self._info_path,) if self._info_path else INFO_PATHS:
            info = self._client.get(path)
            if isinstance(info, dict):
                self._info_path = path
                return {name: info[name] for name in INFO_FIELDS if name in info}
        raise InputError(
            f"{self._client.access.url} has neither {' nor '.join(INFO_PATHS)}: it is no SGLang server.",
            "Use --references-from openai or openai-text for other engines.",
        )

    def ask(self, prompt: RenderedPrompt, *, max_new_tokens: int) -> Answer | Refusal:
        """The greedy completion of a prompt. Raises EvalError."""
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": False, "stop_token_ids": self._stop_ids}
        return self._ask(prompt.token_ids, sampling, stop_ids=self._stop_ids, sample=prompt.id, counted_as=COMPLETIONS)

    def go_on(self, token_ids: Sequence[int], *, count: int, counted_as: str) -> Answer:
        """`count` greedy tokens after `token_ids`. Raises EvalError."""
        sampling = {"max_new_tokens": count, "ignore_eos": True}
        return self._ask(token_ids, sampling, stop_ids=(), sample=counted_as, counted_as=counted_as)

    def _ask(
        self, prompt_ids: Sequence[int], sampling: dict[str, Any], *, stop_ids: Sequence[int], sample: str, counted_as: str
    ) -> Answer:
        question = {
            "input_ids": list(prompt_ids),
            "sampling_params": {"temperature": 0.0, **PENALTIES, **sampling},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        said = self._client.post("/generate", question, counted_as=counted_as)
        meta = said.get("meta_info")
        if not isinstance(meta, dict):
            raise StageError(f"{self._who} answered prompt {sample} without meta_info.", "See whether it is an SGLang server.")
        if meta.get("prompt_tokens", len(prompt_ids)) != len(prompt_ids):
            raise StageError(
                f"{self._who} read prompt {sample} as {meta['prompt_tokens']} tokens; {len(prompt_ids)} were given.",
                "Start it without truncation and without a template of its own.",
            )
        reason = meta.get("finish_reason")
        reason = reason if isinstance(reason, dict) else {"type": reason}
        told = Told(
            token_ids=said.get("output_ids") or _ids_of(meta.get("output_token_logprobs")),
            finish=reason.get("type"),
            matched=reason.get("matched"),
            counted=meta.get("completion_tokens"),
            logprobs=_values_of(meta.get("output_token_logprobs")),
        )
        counters = {name: value for name, value in meta.items() if name.startswith("spec_")}
        answer = settle(
            told,
            prompt_ids=prompt_ids,
            stop_ids=stop_ids,
            max_new_tokens=sampling["max_new_tokens"],
            vocab_size=len(self._tokenizer),
            who=self._who,
            sample=sample,
            served=served_from(counters, tokens=told.counted or 1),
        )
        check_text(said.get("text"), answer.token_ids + answer.past_end, self._tokenizer, who=self._who, sample=sample)
        return answer


def _ids_of(triples: Any) -> list[int] | None:
    """The ids in [value, id, text] triples: what older servers give where they give no `output_ids`."""
    if isinstance(triples, list) and triples and all(isinstance(one, list) and len(one) >= 2 for one in triples):
        return [one[1] for one in triples]
    return None


def _values_of(triples: Any) -> list[float | None] | None:
    if isinstance(triples, list) and all(isinstance(one, list) and len(one) >= 2 for one in triples):
        return [one[0] for one in triples]
    return None
