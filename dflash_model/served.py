"""What a serving engine counted when it answered one request with a drafter of its own, under one set of names.

SGLang puts its counters into `meta_info`, vLLM into `metrics.speculative_decoding`; both changed names over versions, so
whatever was given is kept as it came, too. An engine without a drafter gives none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_STEPS = ("spec_verify_ct", "num_spec_steps")
_ACCEPTED = (
    "spec_num_correct_drafts", "spec_accept_token_num", "spec_accepted_drafts", "spec_accepted_tokens", "num_accepted_draft_tokens",
)  # fmt: skip
_DRAFTED = ("spec_num_proposed_drafts", "spec_draft_token_num", "spec_proposed_drafts", "num_draft_tokens")
_MEANS = ("spec_accept_length", "mean_acceptance_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One request as the engine that answered it counted it."""

    tokens: int
    """Tokens of the completion, that from prefill included."""

    verify_steps: int
    """Verify steps of the engine's own drafter; at least 1."""

    accepted: int | None
    """Drafted tokens that were accepted, the bonus tokens not counted."""

    drafted: int | None
    """Drafted tokens."""

    accept_length: float | None
    """The engine's own figure, by its own definition (SGLang: `tokens` / `verify_steps`)."""

    raw: dict[str, Any] = field(default_factory=dict)
    """Every counter as it came."""

    def __post_init__(self) -> None:
        """ValueError for counts that no request gives."""
        if type(self.tokens) is not int or type(self.verify_steps) is not int or self.tokens < 1 or self.verify_steps < 1:
            raise ValueError(f"served: {self.tokens} tokens in {self.verify_steps} verify steps")


def served_from(counters: Mapping[str, Any], *, tokens: int) -> Served | None:
    """The counters of a completion of `tokens` tokens; None where there are none or no verify step was taken."""
    steps = _whole(counters, _STEPS)
    if not steps or steps < 1:
        return None
    mean = next((counters[name] for name in _MEANS if isinstance(counters.get(name), int | float)), None)
    return Served(
        tokens=tokens,
        verify_steps=steps,
        accepted=_whole(counters, _ACCEPTED),
        drafted=_whole(counters, _DRAFTED),
        accept_length=None if mean is None else float(mean),
        raw=dict(counters),
    )


def tokens_per_step(served: Iterable[Served]) -> float | None:
    """Pooled like tau: the token from prefill is no verify step's, so each request counts one token less. None without any."""
    every = list(served)
    steps = sum(one.verify_steps for one in every)
    return sum(one.tokens - 1 for one in every) / steps if steps else None


def _whole(counters: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """The first of `names` that holds a whole number."""
    return next((counters[name] for name in names if type(counters.get(name)) is int), None)
