"""The replay engine: every anchor that any walk of any sample visits, computed once, all samples in lockstep.

In each round every unfinished walk names the one anchor it needs next; the union over walks and samples is computed in
chunks of `chunk_anchors` blocks. So walks share records, and one sample's sequential walk never leaves the CPU idle.
A block at anchor a sees target states of positions strictly below a: the target has not run on a's token yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dflash_model.drafter.backbone import Context, Drafter, Group
from dflash_model.drafter.tables import DraftTables
from dflash_model.errors import CheckpointError, InputError
from dflash_model.replay.records import UNKNOWN, SampleRecords, Sequence
from dflash_model.replay.scoring import Scores, kept_candidates, score_blocks
from dflash_model.replay.walk import TAILS, TRUNCATED, Matcher, block_rows, counts_in_full, first_anchor, take_step

Progress = Callable[[int, int], None]
"""(samples finished, anchors computed), after each chunk and each finished sample."""

Keep = Callable[[SampleRecords, int], None]
"""(all that is recorded of a finished sample, anchors computed for it now), before its records are given out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reference to replay."""

    sequence: Sequence
    """Its lengths."""

    token_ids: Seq[int]
    """Prompt, completion and overshoot."""

    load_states: Callable[[], Tensor]
    """Gives the target's tap states [N, T * H], any float type, N >= end - 1; called once, when the sample's turn comes, and
    not at all where nothing is left to compute."""

    limit: int | None = None
    """Position at which generation would have been cut, prompt + the most new tokens: tail `pypi` shortens blocks before it."""

    load_known: Callable[[], SampleRecords | None] = lambda: None
    """Gives what an earlier replay of this drafter recorded on this sequence; those anchors are not computed again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What stays the same for a whole replay."""

    drafter: Drafter
    tables: DraftTables
    walks: tuple[Matcher, ...]
    top_k: int
    chunk_anchors: int
    tail: str
    stride: int | None
    every_tail: bool

    def rows_at(self, sample: Sample, anchor: int) -> int:
        """Rows of the block there."""
        return block_rows(anchor, block_size=self.drafter.spec.block_size, tail=self.tail, limit=sample.limit)


class _Active:
    """A sample in work: its context, the records so far, and the anchor that each walk needs next."""

    def __init__(self, sample: Sample, job: _Job) -> None:
        """Check the sample; take over what is known; if anything is left to compute, load its states. Raises InputError."""
        _check_sample(sample, job)
        self.sample, self.sequence, self.job = sample, sample.sequence, job
        self.records: dict[int, SampleRecords] = self._usable(sample.load_known())
        self.computed = 0
        self.fronts: list[int | None] = [first_anchor(sample.sequence, job.tail)] * len(job.walks)
        self.asked: set[int] = set()
        if job.stride is not None:
            self.asked |= set(range(self.sequence.prompt_length, self.sequence.end - 1, job.stride))
        if job.every_tail and self._may_step_at_its_last_token():
            self.asked.add(self.sequence.end - 1)
        padding = [UNKNOWN] * job.drafter.spec.drafted_tokens
        self.tokens = torch.tensor([*sample.token_ids, *padding], dtype=torch.int64)
        self.advance()
        self.context: Context | None = _context(sample, job) if self.missing else None

    def _usable(self, known: SampleRecords | None) -> dict[int, SampleRecords]:
        """The known rows whose blocks were as long as they are now."""
        found: dict[int, SampleRecords] = {}
        if known is None:
            return found
        for row, anchor in enumerate(known.anchors.tolist()):
            drafted = self.job.rows_at(self.sample, anchor) - 1 + self.job.drafter.spec.shift
            if known.drafted_slots(row) == drafted:
                found[anchor] = known.at([row])
        return found

    def _may_step_at_its_last_token(self) -> bool:
        """Under some tail rule, and the tokens to judge that step are known."""
        sequence, drafted = self.sequence, self.job.drafter.spec.drafted_tokens
        return sequence.completion_length > 0 and not sequence.stopped and sequence.overshoot_length >= drafted

    @property
    def missing(self) -> list[int]:
        """Anchors that are waited for, ascending; empty when all are done."""
        fronts = {front for front in self.fronts if front is not None}
        return sorted(fronts | {anchor for anchor in self.asked if anchor not in self.records})

    def add(self, record: SampleRecords) -> None:
        """Keep one anchor's record (A = 1)."""
        self.records[int(record.anchors[0])] = record
        self.computed += 1

    def advance(self) -> None:
        """Move each walk along the records that are there."""
        for index, matcher in enumerate(self.job.walks):
            front = self.fronts[index]
            while front is not None and front in self.records:
                self.asked.add(front)
                matched = matcher(self.records[front], 0)
                _, front = take_step(self.sequence, front, matched=matched, tail=self.job.tail)
            self.fronts[index] = front

    def true_ids(self, anchor: int) -> Tensor:
        """[D] the target's tokens after `anchor`, UNKNOWN past the known ones."""
        return self.tokens[anchor + 1 : anchor + 1 + self.job.drafter.spec.drafted_tokens]

    def finish(self) -> SampleRecords:
        """The records asked for, anchors ascending, however many more are known."""
        return self._joined(self.asked)

    def everything(self) -> SampleRecords:
        """All records, those of earlier replays among them."""
        return self._joined(self.records)

    def _joined(self, anchors: Iterable[int]) -> SampleRecords:
        drafter = self.job.drafter
        kept = kept_candidates(drafter, self.job.tables, self.job.top_k)
        conditional = drafter.candidate_selector is not None
        parts = [self.records[anchor] for anchor in anchors]
        return SampleRecords.joined(self.sequence, parts, slots=drafter.spec.drafted_tokens, kept=kept, conditional=conditional)


def replay(
    drafter: Drafter,
    samples: Iterable[Sample],
    *,
    embedding: Tensor,
    head: Tensor,
    walks: Seq[Matcher],
    top_k: int = 64,
    chunk_anchors: int = 64,
    tail: str = TRUNCATED,
    stride: int | None = None,
    every_tail: bool = False,
    context_bytes: int = 4 << 30,
    on_progress: Progress | None = None,
    on_sample: Keep | None = None,
) -> Iterator[SampleRecords]:
    """Replay `samples` under every matcher of `walks`, on the CPU; yields each sample's records when its last walk ends.

    `embedding` [V, H] (raw rows) and `head` [V, H] are the target's, of any float type; a drafter that owns either uses
    its own (`Drafter.tables`). Where the drafter's slots depend on each other, `walks` may hold no DDTree.
    `stride`: also every stride-th position of a completion, its first one included, whether a walk visits it or not (1: all).
    `every_tail`: also the one anchor that only the tail rules which count in full may visit, a limited request's last token.
    Matchers must decide from the row they are given alone. Records hold the `top_k` best candidates per slot. Samples
    enter in order, as many as fill a chunk and fit into `context_bytes` (one always may), and leave as they finish.
    Raises ConfigError for tables that do not fit the drafter, InputError for a sample that does not fit, CheckpointError
    where logits are not finite, ValueError for other arguments.
    """
    if tail not in TAILS or not walks or top_k < 2 or chunk_anchors < 1 or (stride is not None and stride < 1):
        raise ValueError(f"tail {tail!r}, {len(walks)} walks, top_k {top_k}, chunk_anchors {chunk_anchors}")
    job = _Job(
        drafter=drafter,
        tables=drafter.tables(embedding, head),
        walks=tuple(walks),
        top_k=top_k,
        chunk_anchors=chunk_anchors,
        tail=tail,
        stride=stride,
        every_tail=every_tail,
    )
    nothing = lambda *_: None  # noqa: E731
    return _run(job, iter(samples), context_bytes, on_progress or nothing, on_sample or nothing)


def _run(job: _Job, waiting: Iterator[Sample], context_bytes: int, report: Progress, keep: Keep) -> Iterator[SampleRecords]:
    active: list[_Active] = []
    upcoming = next(waiting, None)
    finished = computed = 0
    while active or upcoming is not None:
        wanted = [(entry, anchor) for entry in active for anchor in entry.missing]
        while upcoming is not None and len(wanted) < job.chunk_anchors and _fits(active, upcoming, job, context_bytes):
            active.append(_Active(upcoming, job))
            wanted += [(active[-1], anchor) for anchor in active[-1].missing]
            upcoming = next(waiting, None)
        for start in range(0, len(wanted), job.chunk_anchors):
            chunk = wanted[start : start + job.chunk_anchors]
            _compute(job, chunk)
            computed += len(chunk)
            report(finished, computed)
        for entry in active:
            entry.advance()
        done = [entry for entry in active if not entry.missing]
        active = [entry for entry in active if entry.missing]
        for entry in done:
            finished += 1
            keep(entry.everything(), entry.computed)
            report(finished, computed)
            yield entry.finish()


def _fits(active: list[_Active], sample: Sample, job: _Job, context_bytes: int) -> bool:
    held = sum(entry.context.size_bytes for entry in active if entry.context is not None)
    wanted = job.drafter.context_bytes(max(0, sample.sequence.end - 1))
    return not active or held + wanted <= context_bytes


@torch.inference_mode()
def _compute(job: _Job, chunk: list[tuple[_Active, int]]) -> None:
    """Draft at every (sample, anchor) of the chunk, which is grouped by sample, and hand each sample its records."""
    spec = job.drafter.spec
    groups = []
    for entry, members in groupby(chunk, key=lambda item: item[0]):
        assert entry.context is not None
        anchors = tuple(anchor for _, anchor in members)
        rows = tuple(job.rows_at(entry.sample, anchor) for anchor in anchors)
        groups.append(Group(context=entry.context, anchors=anchors, rows=rows))
    anchor_ids = torch.stack([entry.tokens[anchor] for entry, anchor in chunk])
    hidden = job.drafter(job.tables.blocks(anchor_ids), groups)
    true_ids = torch.stack([entry.true_ids(anchor) for entry, anchor in chunk])
    scores = score_blocks(job.drafter, job.tables, hidden, anchor_ids, true_ids, top_k=job.top_k)
    for index, (entry, anchor) in enumerate(chunk):
        slots = slice(index * spec.drafted_tokens, (index + 1) * spec.drafted_tokens)
        if not scores.finite[slots].all():
            raise CheckpointError(
                f"{job.drafter.name} gives NaN or infinite logits at anchor {anchor} of sample {entry.sequence.sample_id}.",
                "Compute in fp32; if it stays so, the checkpoint is broken.",
            )
        record = _record(entry.sequence, anchor, true_ids[index], scores, slots)
        drafted = job.rows_at(entry.sample, anchor) - 1 + spec.shift
        entry.add(record if drafted == spec.drafted_tokens else _shortened(record, drafted))


def _shortened(record: SampleRecords, drafted: int) -> SampleRecords:
    """`record` of a block that drafted fewer tokens: nothing is said of the slots past them."""
    blank = {"true_ids": UNKNOWN, "true_rank": UNKNOWN, "true_logprob": np.nan, "log_sum_exp": np.nan}
    blank |= {"top_ids": UNKNOWN, "top_logprobs": -np.inf}
    if record.selected_ids is not None:
        blank["selected_ids"] = UNKNOWN
    changed = {name: getattr(record, name).copy() for name in blank}
    for name, value in blank.items():
        changed[name][:, drafted:] = value
    return replace(record, **changed)


def _record(sequence: Sequence, anchor: int, true_ids: Tensor, scores: Scores, rows: slice) -> SampleRecords:
    """The record of one anchor (A = 1), whose slots are `rows` of `scores`."""
    return SampleRecords(
        sequence=sequence,
        anchors=np.array([anchor], np.int32),
        true_ids=true_ids[None].numpy().astype(np.int32),
        true_rank=scores.true_rank[None, rows],
        true_logprob=scores.true_logprob[None, rows],
        top_ids=scores.top_ids[None, rows],
        top_logprobs=scores.top_logprobs[None, rows],
        log_sum_exp=scores.log_sum_exp[None, rows],
        selected_ids=None if scores.selected_ids is None else scores.selected_ids[None, rows],
    )


def _check_sample(sample: Sample, job: _Job) -> None:
    sequence, name = sample.sequence, f"Sample {sample.sequence.sample_id}"
    known = sequence.end + sequence.overshoot_length
    if len(sample.token_ids) != known:
        raise InputError(f"{name} has {len(sample.token_ids)} token ids, but its lengths add up to {known}.", "Make it anew.")
    highest = job.tables.known_ids - 1
    if known and not (min(sample.token_ids) >= 0 and max(sample.token_ids) <= highest):
        raise InputError(f"{name} holds token ids outside 0..{highest}.", "Tokens and tables must come from one target.")
    needed = job.drafter.spec.drafted_tokens
    if counts_in_full(sequence, job.tail) and sequence.overshoot_length < needed:
        raise InputError(
            f"{name} knows {sequence.overshoot_length} tokens past its end, but tail {job.tail!r} counts the last step in full.",
            f"Make references with at least {needed} overshoot tokens, or use tail '{TRUNCATED}'.",
        )


def _context(sample: Sample, job: _Job) -> Context:
    rows, width = sample.sequence.end - 1, job.drafter.spec.num_taps * job.drafter.spec.hidden_size
    states = sample.load_states()
    if states.dim() != 2 or len(states) < rows or states.shape[1] != width:
        raise InputError(
            f"Sample {sample.sequence.sample_id} has hidden states of shape {list(states.shape)}, needed [>= {rows}, {width}].",
            "Extract the states anew, from these tokens and for this drafter's layers.",
        )
    states = states[:rows]
    if not bool(torch.isfinite(states).all()):
        raise InputError(
            f"Hidden states of sample {sample.sequence.sample_id} hold NaN or infinite values.", "Extract them anew."
        )
    return job.drafter.make_context(states)
