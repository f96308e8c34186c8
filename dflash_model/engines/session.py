"""References from one engine: what is kept is not asked for, the rest is asked in rounds, and each round is confirmed.

Every answer is kept at once, as pending; after each round the server must be what it was before, else that round's answers
are thrown away. Where nothing is missing the server is not spoken to at all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_model.engines.answer import Engine, Refusal
from dflash_model.engines.asking import ask_all
from dflash_model.engines.identity import Canary, ask_canary, require_same
from dflash_model.errors import StageError
from dflash_model.target.prompts import RenderedPrompt
from dflash_model.target.references import Reference
from dflash_model.target.sample_store import Kept, SampleStore

log = logging.getLogger(__name__)

ROUNDS_PER_WORKER = 4
"""Answers of each worker between two confirmations: the canary then costs a few percent, and little is lost with a round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is wanted of each prompt."""

    max_new_tokens: int
    """Limit of a completion."""

    overshoot_tokens: int
    """Greedy tokens past its end, where the engine can be asked for them."""

    max_positions: int
    """Positions that the target has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """The server as it was when a session began."""

    identity: dict[str, Any]
    canary: Canary | None

    def to_json(self) -> dict[str, Any]:
        return {"identity": self.identity, "canary": None if self.canary is None else self.canary.to_json()}

    def is_that_of(self, noted: dict[str, Any]) -> bool:
        """Whether an earlier session spoke to the same model."""
        try:
            before = None if noted["canary"] is None else Canary.from_json(noted["canary"])
            same = noted["identity"] == self.identity
        except (KeyError, TypeError):
            return False
        return same and before is not None and self.canary is not None and before.same_model(self.canary)


class Session:
    """Answers prompts through one engine."""

    def __init__(
        self,
        engine: Engine,
        store: SampleStore,
        tokenizer: Any,
        wish: Wish,
        *,
        accept: Callable[[dict[str, Any]], str],
        concurrency: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """`accept` gets the server's identity and says how far it is the target's, or raises InputError."""
        self._engine, self._store, self._tokenizer, self._wish = engine, store, tokenizer, wish
        self._accept, self._concurrency, self._on_progress = accept, concurrency, on_progress
        self.generated = 0
        self.identity: dict[str, Any] | None = None
        self.accepted_as: str | None = None

    def answers(self, prompts: Sequence[RenderedPrompt]) -> list[Kept]:
        """A reference for each prompt, or why it has none. Raises EvalError."""
        found = {prompt.token_ids: self._store.read(prompt) for prompt in prompts}
        missing = [prompt for prompt in prompts if found[prompt.token_ids] is None]
        missing = list({prompt.token_ids: prompt for prompt in missing}.values())
        self._on_progress(len(prompts) - len(missing), len(prompts))
        if missing:
            known = self._meet()
            unconfirmed = [prompt for prompt in missing if not self._take_pending(prompt, known, found)]
            size = ROUNDS_PER_WORKER * self._concurrency
            for start in range(0, len(unconfirmed), size):
                self._round(unconfirmed[start : start + size], known, found)
                self._on_progress(len(prompts) - len(unconfirmed) + min(start + size, len(unconfirmed)), len(prompts))
        return [_under(found[prompt.token_ids], prompt) for prompt in prompts]

    def _meet(self) -> _Known:
        identity = self._engine.identity()
        self.identity, self.accepted_as = identity, self._accept(identity)
        return _Known(identity=identity, canary=ask_canary(self._engine, self._tokenizer))

    def _take_pending(self, prompt: RenderedPrompt, known: _Known, found: dict[tuple[int, ...], Kept | None]) -> bool:
        """What a session that was killed got, where the server still is what it was then."""
        pending = self._store.read_pending(prompt)
        if pending is None:
            return False
        kept, noted = pending
        if not known.is_that_of(noted):
            log.warning("an unconfirmed answer to %s was given by another model; it is asked for anew", prompt.id)
            self._store.drop_pending(prompt)
            return False
        self._store.confirm(prompt, kept)
        found[prompt.token_ids] = kept
        return True

    def _round(self, prompts: Sequence[RenderedPrompt], known: _Known, found: dict[tuple[int, ...], Kept | None]) -> None:
        def ask(prompt: RenderedPrompt) -> Kept:
            kept = self._one(prompt)
            require_same(self._engine, self._tokenizer, identity=known.identity, canary=None, since="when it was first asked")
            # Kept before this worker asks for the next one: a kill loses no answer that came.
            self._store.write_pending(prompt, kept, known.to_json())
            return kept

        done: list[tuple[RenderedPrompt, Kept]] = []
        for prompt, kept in ask_all(prompts, ask, concurrency=self._concurrency):
            self.generated += 1
            done.append((prompt, kept))
        try:
            require_same(
                self._engine, self._tokenizer, identity=known.identity, canary=known.canary, since="when it was first asked"
            )
        except StageError:
            for prompt, _ in done:
                self._store.drop_pending(prompt)
            raise
        for prompt, kept in done:
            self._store.confirm(prompt, kept)
            found[prompt.token_ids] = kept

    def _one(self, prompt: RenderedPrompt) -> Kept:
        """One prompt's completion, and what would have followed."""
        wish = self._wish
        answer = self._engine.ask(prompt, max_new_tokens=wish.max_new_tokens)
        if isinstance(answer, Refusal):
            log.warning("prompt %s is left out: %s", prompt.id, answer.reason)
            return answer.reason
        overshoot = answer.past_end[: wish.overshoot_tokens]
        known = prompt.token_ids + answer.token_ids + overshoot
        count = min(wish.overshoot_tokens - len(overshoot), wish.max_positions - len(known))
        if count > 0 and self._engine.can_continue:
            overshoot += self._engine.go_on(known, count=count, counted_as="continuations").token_ids
        return Reference(
            sample_id=prompt.id,
            prompt_ids=tuple(prompt.token_ids),
            completion_ids=answer.token_ids,
            overshoot_ids=overshoot,
            finish=answer.finish,
            logprobs=answer.logprobs,
            engine=self._engine.name,
            token_source=answer.token_source,
            served=answer.served,
        )


def _under(kept: Kept | None, prompt: RenderedPrompt) -> Kept:
    """The same under this prompt's id: two prompts of a set may have the same tokens."""
    assert kept is not None
    return kept if isinstance(kept, str) else replace(kept, sample_id=prompt.id)
