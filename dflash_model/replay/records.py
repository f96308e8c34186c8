"""Records: what a drafter said at each visited anchor. Every metric is a pure function of them.

Shapes: A anchors, D drafted tokens per block, K kept candidates per slot. Column d always speaks of the token at
position anchor + d + 1, whatever the drafter's shift, so walks and metrics need not know the convention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from dflash_model.checkpoint.safetensors_writer import OutgoingTensor, write_safetensors
from dflash_model.errors import StorageError

RECORDS_VERSION = "2"
_READ_VERSIONS = ("1", "2")
"""Version 1 has no `drafted_ids`: its slots were independent, which is what their absence still means."""

UNKNOWN = -1
"""In `true_ids` and `true_rank`: the target's token at that position is not known (past the end of the reference)."""

NEVER = int(np.iinfo(np.int32).max)
"""In `true_rank`: the drafter cannot propose that token, as the head has no row for it or the selector no such candidate.
A miss for a walk of any width."""

NEAR_TIE_NATS = 1e-4
"""Log-probability gap below which other arithmetic (threads, batch shapes) may draft the other candidate."""

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequence:
    """One reference as the walks see it: positions 0..P-1 prompt, P..P+G-1 completion, then overshoot."""

    sample_id: str
    """The prompt's id."""

    prompt_length: int
    """P, in tokens."""

    completion_length: int
    """G, in tokens, the stop token included; position P holds the token from prefill."""

    overshoot_length: int
    """Greedy tokens known past the completion's end."""

    stopped: bool
    """True: the completion ends with a stop token. False: it reached the limit."""

    @property
    def end(self) -> int:
        """Position one past the completion."""
        return self.prompt_length + self.completion_length


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecords:
    """All records of one drafter on one sequence, anchors ascending."""

    sequence: Sequence
    """The reference these records were scored against."""

    anchors: Int32
    """[A] positions whose token was given to the block."""

    true_ids: Int32
    """[A, D] the target's token at anchor + d + 1, or UNKNOWN."""

    true_rank: Int32
    """[A, D] candidates scored above the true token (equal scores: lower id first); 0 = drafted; or UNKNOWN, or NEVER."""

    true_logprob: Float32
    """[A, D] natural log-probability of the true token under the drafter; NaN where unknown, -inf where never drafted."""

    top_ids: Int32
    """[A, D, K] best candidates as the target's ids, best first, ties to the lower id; UNKNOWN in slots not drafted."""

    top_logprobs: Float32
    """[A, D, K] their natural log-probabilities; -inf in slots not drafted."""

    log_sum_exp: Float32
    """[A, D] log-sum-exp of the slot's logits."""

    selected_ids: Int32 | None = None
    """[A, D] the block's own greedy draft where its slots depend on each other (DFlash2), else None.

    Ranks and probabilities are then conditional: slot d is scored given the true token before it (the draft's own where
    that is unknown), among the selector's candidates. A chain, and a tree that keeps the w best children of each node,
    reach a slot only along the true tokens, so `true_rank` decides them exactly. A DDTree over the product of the slots'
    marginals is not defined for such a draft."""

    @property
    def conditional(self) -> bool:
        """Whether slots are scored given the token before them."""
        return self.selected_ids is not None

    @property
    def drafted_ids(self) -> Int32:
        """[A, D] what a greedy block proposes."""
        return self.top_ids[..., 0] if self.selected_ids is None else self.selected_ids

    def row_of(self, anchor: int) -> int | None:
        """Index of `anchor` in the rows, or None."""
        row = int(np.searchsorted(self.anchors, anchor))
        return row if row < len(self.anchors) and int(self.anchors[row]) == anchor else None

    @property
    def near_ties(self) -> int | None:
        """Slots whose two best candidates lie within NEAR_TIE_NATS of each other; None where K < 2."""
        if self.top_logprobs.shape[-1] < 2:
            return None
        drafted = self.top_ids[..., 0] != UNKNOWN
        best, second = self.top_logprobs[drafted, 0], self.top_logprobs[drafted, 1]
        return int(np.count_nonzero(best - second < NEAR_TIE_NATS))

    def drafted_slots(self, row: int) -> int:
        """How many tokens the block of `row` drafted: D, or fewer where it was shortened before a limit."""
        return int(np.count_nonzero(self.top_ids[row, :, 0] != UNKNOWN))

    def at(self, rows: Iterable[int]) -> SampleRecords:
        """The same records at some rows, given in ascending order."""
        chosen = np.fromiter(rows, dtype=np.int64)
        names = _ARRAYS if self.selected_ids is None else (*_ARRAYS, "selected_ids")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    @classmethod
    def joined(
        cls, sequence: Sequence, parts: Iterable[SampleRecords], *, slots: int, kept: int, conditional: bool = False
    ) -> SampleRecords:
        """All rows of `parts` (of one sequence), anchors ascending; without parts no row, but D `slots` and K `kept`.

        `conditional`: whether the parts are so, all of them.
        """
        empty = cls(
            sequence=sequence,
            anchors=np.zeros(0, np.int32),
            true_ids=np.zeros((0, slots), np.int32),
            true_rank=np.zeros((0, slots), np.int32),
            true_logprob=np.zeros((0, slots), np.float32),
            top_ids=np.zeros((0, slots, kept), np.int32),
            top_logprobs=np.zeros((0, slots, kept), np.float32),
            log_sum_exp=np.zeros((0, slots), np.float32),
            selected_ids=np.zeros((0, slots), np.int32) if conditional else None,
        )
        ordered = [empty, *sorted(parts, key=lambda part: int(part.anchors[0]))]
        names = (*_ARRAYS, "selected_ids") if conditional else _ARRAYS
        return cls(sequence=sequence, **{name: np.concatenate([getattr(part, name) for part in ordered]) for name in names})

    def save(self, path: Path) -> None:
        """Write one safetensors file, the same bytes for the same records. Raises EvalError."""
        sequence = self.sequence
        metadata = {
            "records_version": RECORDS_VERSION,
            "sample_id": sequence.sample_id,
            "prompt_length": str(sequence.prompt_length),
            "completion_length": str(sequence.completion_length),
            "overshoot_length": str(sequence.overshoot_length),
            "stopped": str(int(sequence.stopped)),
        }
        outgoing = [_outgoing(name, getattr(self, name)) for name in _ARRAYS]
        if self.selected_ids is not None:
            outgoing.append(_outgoing(_DRAFTED, self.selected_ids))
        write_safetensors(path, outgoing, metadata=metadata)

    @classmethod
    def load(cls, path: Path) -> SampleRecords:
        """Read what `save` wrote. Raises StorageError."""
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in _ARRAYS}
                selected = file.get_tensor(_DRAFTED) if _DRAFTED in file.keys() else None  # noqa: SIM118
        except (OSError, SafetensorError) as exc:
            raise StorageError(f"{path} is not a records file: {exc}.", "Delete the replay artifact and run again.") from exc
        if metadata.get("records_version") not in _READ_VERSIONS:
            raise StorageError(
                f"{path} has records version {metadata.get('records_version')}, expected one of {', '.join(_READ_VERSIONS)}.",
                "Run the replay again.",
            )
        sequence = Sequence(
            sample_id=metadata["sample_id"],
            prompt_length=int(metadata["prompt_length"]),
            completion_length=int(metadata["completion_length"]),
            overshoot_length=int(metadata["overshoot_length"]),
            stopped=metadata["stopped"] == "1",
        )
        return cls(sequence=sequence, selected_ids=selected, **arrays)


def _outgoing(name: str, array: Int32 | Float32) -> OutgoingTensor:
    dtype = {np.dtype(np.int32): "I32", np.dtype(np.float32): "F32"}[array.dtype]
    return OutgoingTensor(name=name, dtype=dtype, shape=array.shape, blocks=lambda: [array.tobytes()])


_DRAFTED = "drafted_ids"
"""Tensor of `selected_ids` in a file."""

_ARRAYS = ("anchors", "true_ids", "true_rank", "true_logprob", "top_ids", "top_logprobs", "log_sum_exp")
