"""The replay engine: every anchor that any walk of any sample visits, computed once, all samples in lockstep.

In each round every unfinished walk names the one anchor it needs next; the union over walks and samples is computed in
chunks of `chunk_anchors` blocks. So walks share records, and one sample's sequential walk never leaves the CPU idle.
A block at anchor a sees target states of positions strictly below a: the target has not run on a's token yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from dflash_model.drafter.backbone import Context, Drafter, Group
from dflash_model.drafter.tables import DraftTables
from dflash_model.errors import CheckpointError, InputError
from dflash_model.replay.records import UNKNOWN, SampleRecords, Sequence
from dflash_model.replay.scoring import Scores, kept_candidates, score_blocks
from dflash_model.replay.walk import TAILS, TRUNCATED, ZLAB, Matcher, first_anchor, take_step

Progress = Callable[[int, int], None]
"""(samples finished, anchors computed), after each chunk and each finished sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One reference to replay."""

    sequence: Sequence
    """Its lengths."""

    token_ids: Seq[int]
    """Prompt, completion and overshoot."""

    load_states: Callable[[], Tensor]
    """Gives the target's tap states [N, T * H], any float type, N >= end - 1; called once, when the sample's turn comes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """What stays the same for a whole replay."""

    drafter: Drafter
    tables: DraftTables
    walks: tuple[Matcher, ...]
    top_k: int
    chunk_anchors: int
    tail: str

    @property
    def scratch_blocks(self) -> int:
        return min(self.chunk_anchors, len(self.walks))


class _Active:
    """A sample in work: its context, the records so far, and the anchor that each walk needs next."""

    def __init__(self, sample: Sample, job: _Job) -> None:
        """Check the sample and, if it has any step, load its states. Raises InputError."""
        _check_sample(sample, job)
        self.sequence = sample.sequence
        self.job = job
        self.records: dict[int, SampleRecords] = {}
        start = first_anchor(sample.sequence, job.tail)
        self.fronts: list[int | None] = [start] * len(job.walks)
        padding = [UNKNOWN] * job.drafter.spec.drafted_tokens
        self.tokens = torch.tensor([*sample.token_ids, *padding], dtype=torch.int64)
        self.context: Context | None = _context(sample, job) if start is not None else None

    @property
    def missing(self) -> list[int]:
        """Anchors that walks wait for, ascending; empty when all are done."""
        return sorted({front for front in self.fronts if front is not None})

    def add(self, record: SampleRecords) -> None:
        """Keep one anchor's record (A = 1)."""
        self.records[int(record.anchors[0])] = record

    def advance(self) -> None:
        """Move each walk along the records that are there."""
        for index, matcher in enumerate(self.job.walks):
            front = self.fronts[index]
            while front is not None and front in self.records:
                matched = matcher(self.records[front], 0)
                _, front = take_step(self.sequence, front, matched=matched, tail=self.job.tail)
            self.fronts[index] = front

    def true_ids(self, anchor: int) -> Tensor:
        """[D] the target's tokens after `anchor`, UNKNOWN past the known ones."""
        return self.tokens[anchor + 1 : anchor + 1 + self.job.drafter.spec.drafted_tokens]

    def finish(self) -> SampleRecords:
        """All records, anchors ascending."""
        drafter = self.job.drafter
        kept = kept_candidates(drafter, self.job.tables, self.job.top_k)
        conditional = drafter.candidate_selector is not None
        slots = drafter.spec.drafted_tokens
        return SampleRecords.joined(self.sequence, self.records.values(), slots=slots, kept=kept, conditional=conditional)


def replay(
    drafter: Drafter,
    samples: Iterable[Sample],
    *,
    embedding: Tensor,
    head: Tensor,
    walks: Seq[Matcher],
    top_k: int = 64,
    chunk_anchors: int = 32,
    tail: str = TRUNCATED,
    context_bytes: int = 4 << 30,
    on_progress: Progress | None = None,
) -> Iterator[SampleRecords]:
    """Replay `samples` under every matcher of `walks`, on the CPU; yields each sample's records when its last walk ends.

    `embedding` [V, H] (raw rows) and `head` [V, H] are the target's, of any float type; a drafter that owns either uses
    its own (`Drafter.tables`). Where the drafter's slots depend on each other, `walks` may hold no DDTree.
    Matchers must decide from the row they are given alone. Records hold the `top_k` best candidates per slot. Samples
    enter in order, as many as fill a chunk and fit into `context_bytes` (one always may), and leave as they finish.
    Raises ConfigError for tables that do not fit the drafter, InputError for a sample that does not fit, CheckpointError
    where logits are not finite, ValueError for other arguments.
    """
    if tail not in TAILS or not walks or top_k < 2 or chunk_anchors < 1:
        raise ValueError(f"tail {tail!r}, {len(walks)} walks, top_k {top_k}, chunk_anchors {chunk_anchors}")
    job = _Job(
        drafter=drafter,
        tables=drafter.tables(embedding, head),
        walks=tuple(walks),
        top_k=top_k,
        chunk_anchors=chunk_anchors,
        tail=tail,
    )
    return _run(job, iter(samples), context_bytes, on_progress or (lambda samples, anchors: None))


def _run(job: _Job, waiting: Iterator[Sample], context_bytes: int, report: Progress) -> Iterator[SampleRecords]:
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
            report(finished, computed)
            yield entry.finish()


def _fits(active: list[_Active], sample: Sample, job: _Job, context_bytes: int) -> bool:
    held = sum(entry.context.size_bytes for entry in active if entry.context is not None)
    wanted = job.drafter.context_bytes(max(0, sample.sequence.end - 1), scratch_blocks=job.scratch_blocks)
    return not active or held + wanted <= context_bytes


@torch.inference_mode()
def _compute(job: _Job, chunk: list[tuple[_Active, int]]) -> None:
    """Draft at every (sample, anchor) of the chunk, which is grouped by sample, and hand each sample its records."""
    spec = job.drafter.spec
    groups = []
    for entry, members in groupby(chunk, key=lambda item: item[0]):
        assert entry.context is not None
        groups.append(Group(context=entry.context, anchors=tuple(anchor for _, anchor in members)))
    anchor_ids = torch.stack([entry.tokens[anchor] for entry, anchor in chunk])
    hidden = job.drafter(job.tables.blocks(anchor_ids), groups)
    true_ids = torch.stack([entry.true_ids(anchor) for entry, anchor in chunk])
    scores = score_blocks(job.drafter, job.tables, hidden, anchor_ids, true_ids, top_k=job.top_k)
    for index, (entry, anchor) in enumerate(chunk):
        rows = slice(index * spec.drafted_tokens, (index + 1) * spec.drafted_tokens)
        if not scores.finite[rows].all():
            raise CheckpointError(
                f"{job.drafter.name} gives NaN or infinite logits at anchor {anchor} of sample {entry.sequence.sample_id}.",
                "Compute in fp32; if it stays so, the checkpoint is broken.",
            )
        entry.add(_record(entry.sequence, anchor, true_ids[index], scores, rows))


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
    if job.tail == ZLAB and sequence.overshoot_length < needed:
        raise InputError(
            f"{name} knows {sequence.overshoot_length} tokens past its end, but tail 'zlab' counts the last step in full.",
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
    return job.drafter.make_context(states, scratch_blocks=job.scratch_blocks)
