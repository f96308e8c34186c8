"""Verify walks: from anchor to anchor, each step as long as the accepted prefix allows, plus the bonus token.

The tail rules differ only at the end of a request:
  truncated  serving engines: every block is whole, and a step is cut at the stop token or the limit; no step starts at the
             last token.
  pypi       PyPI dflash: the same counting, but a block that would reach past the limit is drafted shorter, which for a
             bidirectional block means other tokens (`block_rows`).
  zlab       z-lab's git loop: the last step counts in full, past stop or limit; a request that ends by its limit may start
             one more step at its last token.
  deepspec   DeepSpec: a stop token among the accepted drafts ends the request, without a bonus token; at the limit as zlab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dflash_model.replay.records import UNKNOWN, SampleRecords, Sequence

TRUNCATED = "truncated"
ZLAB = "zlab"
PYPI = "pypi"
DEEPSPEC = "deepspec"
TAILS = (TRUNCATED, ZLAB, PYPI, DEEPSPEC)

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


def counts_in_full(sequence: Sequence, tail: str) -> bool:
    """Whether this request's last step may earn more tokens than the request still wants. ValueError for another tail."""
    if tail not in TAILS:
        raise ValueError(f"tail {tail!r}, expected one of {TAILS}")
    return tail == ZLAB or (tail == DEEPSPEC and not sequence.stopped)


def block_rows(anchor: int, *, block_size: int, tail: str, limit: int | None) -> int:
    """Rows of the block at `anchor`, its own included, when the request may reach position `limit` - 1 (None: no limit known)."""
    return block_size if tail != PYPI or limit is None else max(1, min(block_size, limit - anchor))


def _next_anchor(sequence: Sequence, start: int, tail: str, *, first: bool = False) -> int | None:
    in_full = counts_in_full(sequence, tail)
    if sequence.completion_length == 0:
        return None
    if not in_full:
        return start if start < sequence.end - 1 else None
    if first:
        return start
    done_by_stop = sequence.stopped and start >= sequence.end - 1
    return None if done_by_stop or start >= sequence.end else start


def take_step(sequence: Sequence, anchor: int, *, matched: int, tail: str) -> tuple[int, int | None]:
    """(tokens earned, next anchor or None) of a step at `anchor` that accepts `matched` drafts.

    A step earns matched + 1 tokens (accepted drafts and the bonus token), and no more than end - 1 - anchor, the tokens that
    the request still wants, unless the tail rule counts in full. (DeepSpec's step that ends in an accepted stop token has no
    bonus token: its drafts up to there are just those wanted tokens.)
    """
    step = matched + 1
    if not counts_in_full(sequence, tail):
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
