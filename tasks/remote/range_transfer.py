"""One stretch of a safetensors file on its way into one part on another host, whatever breaks meanwhile.

A stretch is made of whole pieces (the header, tensors), since a tensor is checked as a whole. What an earlier run left in the
part is believed only after the host has hashed it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

from dflash_model.checkpoint.extract import ExtractPlan
from dflash_model.checkpoint.safetensors_writer import OutgoingPiece
from dflash_model.errors import HostError
from tasks.remote.host import Host
from tasks.remote.journal import MARK_BYTES, Journal, Span
from tasks.remote.origin import Origin
from tasks.remote.part import Part

SMALLEST_BYTES = 8 << 20
"""A stretch shorter than this is not worth a connection of its own."""

FRESH_TRIES = 5
OnPosition = Callable[[int, int], None]
"""(number of the stretch, bytes of it that are there)"""


def split_pieces(pieces: Sequence[OutgoingPiece], count: int) -> list[list[OutgoingPiece]]:
    """At most `count` stretches of about the same size, in order, none empty."""
    total = sum(piece.size_bytes for piece in pieces)
    count = max(1, min(count, total // SMALLEST_BYTES))
    stretches: list[list[OutgoingPiece]] = [[]]
    for piece in pieces:
        # The middle of a piece decides where it belongs.
        if (piece.offset + piece.size_bytes / 2) * count > total * len(stretches) and stretches[-1]:
            stretches.append([])
        stretches[-1].append(piece)
    return stretches


class RangeTransfer:
    """One such stretch."""

    def __init__(
        self,
        number: int,
        pieces: Sequence[OutgoingPiece],
        *,
        plan: ExtractPlan,
        origin: Origin,
        destination: Host,
        part: Part,
        journal: Journal,
        on_position: OnPosition,
    ) -> None:
        """`pieces` of `plan`, read over `origin`; the journal already has notes of part `number`."""
        self.begin, self.end = pieces[0].offset, pieces[-1].offset + pieces[-1].size_bytes
        self.part, self.origin = part, origin
        self.resumed_bytes = 0
        self._number, self._pieces = number, pieces
        self._ends = {piece.offset + piece.size_bytes for piece in pieces}
        self._plan, self._destination = plan, destination
        self._journal, self._on_position = journal, on_position

    def watch(self, check: Callable[[], None]) -> None:
        """Call `check`, which may raise, again and again."""
        self.part.check = check

    def run(self) -> list[Span]:
        """Fill the part; the spans that make it up. Raises EvalError."""
        for attempt in range(FRESH_TRIES):
            spans = self._believed()
            begin = spans[-1].end if spans else self.begin
            if attempt == 0:
                self.resumed_bytes = begin - self.begin
            self._journal.settle(self._number, spans)
            self._on_position(self._number, begin - self.begin)
            filled: list[Span] = []
            todo = [piece for piece in self._pieces if piece.offset >= begin]
            if self.part.fill(self._hashed(todo, begin, filled), at=begin - self.begin):
                self._journal.settle(self._number, [*spans, *filled])
                return [*spans, *filled]
        raise HostError(
            f"[{self._destination.name}] {self.part.path} lost what had been written to it, {FRESH_TRIES} times.",
            "Look at the disk of that host, then run again.",
        )

    def _hashed(self, pieces: Sequence[OutgoingPiece], begin: int, filled: list[Span]) -> Iterator[bytes]:
        """The pieces' bytes; the journal learns of every MARK_BYTES, `filled` of the whole."""
        digest = hashlib.sha256()
        position = marked = begin
        for block in self._plan.blocks(pieces):
            digest.update(block)
            position += len(block)
            yield block
            self._on_position(self._number, position - self.begin)
            if position in self._ends and position - marked >= MARK_BYTES and position < self.end:
                marked = position
                self._journal.mark(self._number, self._span(begin, position, digest.copy().hexdigest()))
        if position > begin:
            filled.append(self._span(begin, position, digest.hexdigest()))

    def _span(self, begin: int, end: int, sha256: str) -> Span:
        return Span(begin=begin, end=end, sha256=sha256, reads=self.origin.reads() if self.origin.records else [])

    def _believed(self) -> list[Span]:
        """The longest row of noted spans that the part really holds."""
        notes = self._journal.parts[self._number]
        rows = [[*notes.spans, mark] for mark in reversed(notes.marks)] + ([notes.spans] if notes.spans else [])
        if not rows:
            return []
        there = self.part.size()
        for row in [row for row in rows if row[-1].end - self.begin <= there and row[-1].end in self._ends][:2]:
            ranges = [(span.begin - self.begin, span.end - span.begin) for span in row]
            if self._destination.range_sha256(self.part.path, ranges) == [span.sha256 for span in row]:
                return row
        return []
