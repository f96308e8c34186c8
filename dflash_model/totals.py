"""The two numbers of a request that every tau, interval and verdict is made of: its verify steps and their tokens.

`metrics.RequestRow` knows each step; `RequestTotals` is what a finished evaluation kept of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Request(Protocol):
    """One request under one drafter, as comparisons see it."""

    @property
    def sample_id(self) -> str:
        """The prompt's id."""
        ...

    @property
    def category(self) -> str | None:
        """The prompt's category, None where it has none."""
        ...

    @property
    def steps(self) -> int:
        """Verify steps."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens earned by all steps, bonus tokens included, the token from prefill not."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTotals:
    """A request of a finished evaluation; the fields are those of `Request`."""

    sample_id: str
    """The prompt's id."""

    category: str | None
    """The prompt's category, None where it has none."""

    steps: int
    """Verify steps."""

    tokens: int
    """Tokens of those steps."""
