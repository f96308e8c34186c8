"""Verify walks: from anchor to anchor, each step as long as the accepted prefix allows, plus the bonus token.

The two tail rules differ only in the last step of a request:
  truncated  PyPI dflash and serving engines: a step is cut at the stop token or the limit; no step starts at the last token.
  zlab       z-lab's git loop: the last step counts in full, past stop or limit; a request that ends by its limit
             may start one more step at its last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_model.replay.records import UNKNOWN, SampleRecords, Sequence

TRUNCATED = "truncated"
ZLAB = "zlab"
TAILS = (TRUNCATED, ZLAB)

Matcher = Callable[[SampleRecords, int], int]
"""(records, row) -> how many leading drafted tokens of that block are accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """The verify steps of one request."""

    anchors: tuple[int, ...]
    """Where each step started."""

    steps: tuple[int, ...]
    """Tokens earned by each step, bonus token included."""

    missing: int | None
    """The anchor whose record the walk needs next; None when the walk is complete."""


def chain_matched(records: SampleRecords, row: int) -> int:
    """Accepted drafts of a greedy chain: leading slots whose drafted token is the true one."""
    return streak_matched(records, row, width=1)


def streak_matched(records: SampleRecords, row: int, *, width: int) -> int:
    """Leading slots whose true token is among the `width` best candidates: an upper bound for trees that wide."""
    matched = 0
    for rank in records.true_rank[row]:
        if rank == UNKNOWN or rank >= width:
            break
        matched += 1
    return matched


def first_anchor(sequence: Sequence, tail: str) -> int | None:
    """The first step's anchor (the token from prefill), or None where the request has no step."""
    return _next_anchor(sequence, sequence.prompt_length, tail, first=True)


def _next_anchor(sequence: Sequence, start: int, tail: str, *, first: bool = False) -> int | None:
    if sequence.completion_length == 0:
        return None
    if tail == TRUNCATED:
        return start if start < sequence.end - 1 else None
    if tail == ZLAB:
        if first:
            return start
        done_by_stop = sequence.stopped and start >= sequence.end - 1
        return None if done_by_stop or start >= sequence.end else start
    raise ValueError(f"tail {tail!r}, expected one of {TAILS}")


def take_step(sequence: Sequence, anchor: int, *, matched: int, tail: str) -> tuple[int, int | None]:
    """(tokens earned, next anchor or None) of a step at `anchor` that accepts `matched` drafts.

    A step earns matched + 1 tokens (accepted drafts and the bonus token); under `truncated` no more than
    end - 1 - anchor, the tokens that the request still wants.
    """
    step = matched + 1
    if tail == TRUNCATED:
        step = min(step, sequence.end - 1 - anchor)
    return step, _next_anchor(sequence, anchor + step, tail)


def walk(records: SampleRecords, matcher: Matcher, *, tail: str = TRUNCATED) -> Walk:
    """Walk one request, step by step (`take_step`), as far as its records reach."""
    sequence = records.sequence
    anchors: list[int] = []
    steps: list[int] = []
    anchor = first_anchor(sequence, tail)
    while anchor is not None:
        row = records.row_of(anchor)
        if row is None:
            break
        anchors.append(anchor)
        step, anchor = take_step(sequence, anchor, matched=matcher(records, row), tail=tail)
        steps.append(step)
    return Walk(anchors=tuple(anchors), steps=tuple(steps), missing=anchor)
