"""The map of a reduced vocabulary: `d2t` [Vd] holds whole-number offsets, row i of the head is the target's id i + d2t[i].

speculators' `t2d` [V] marks the same ids once more; it is compared with d2t and left behind. A wrong map drafts other words
without any error.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_model.checkpoint.state_dict import StateDict
from dflash_model.checkpoint.table import TensorTable
from dflash_model.checkpoint.tensor_names import VOCABULARY_MAP, VOCABULARY_MARKS
from dflash_model.errors import CheckpointError

_SAME = "Take config, head and map from the same checkpoint."
_OFFSETS = {"I64": np.int64, "I32": np.int32}
_MARKS = {"BOOL": np.bool_, "U8": np.bool_}


def without_marks(table: TensorTable[Any], state: StateDict[Any]) -> StateDict[Any]:
    """`state` without t2d, once it was compared with d2t. Raises CheckpointError where the two disagree."""
    marks = state.tensors.get(VOCABULARY_MARKS)
    if marks is None:
        return state
    if VOCABULARY_MAP not in state.tensors:
        raise CheckpointError(
            f"{table.name} holds {VOCABULARY_MARKS} but no {VOCABULARY_MAP}.", "Save both maps, or d2t alone, with the weights."
        )
    check_map(read_map(table, state.tensors[VOCABULARY_MAP]), _array(table, VOCABULARY_MARKS, marks, _MARKS), vocab_size=None)
    return replace(
        state,
        tensors={name: entry for name, entry in state.tensors.items() if name != VOCABULARY_MARKS},
        dropped=state.dropped | {VOCABULARY_MARKS: f"says what {VOCABULARY_MAP} says, and was compared with it"},
    )


def read_map(table: TensorTable[Any], entry: Any) -> NDArray[np.int64]:
    """d2t's values. Raises CheckpointError for another dtype than whole numbers."""
    found: NDArray[np.int64] = _array(table, VOCABULARY_MAP, entry, _OFFSETS).astype(np.int64)
    return found


def _array(table: TensorTable[Any], name: str, entry: Any, dtypes: dict[str, Any]) -> Any:
    if entry.dtype not in dtypes:
        raise CheckpointError(
            f"{name} in {table.name} is stored as {entry.dtype}, expected {' or '.join(dtypes)}.", "Save it so."
        )
    return np.frombuffer(b"".join(table.blocks(entry)), dtype=dtypes[entry.dtype])


def check_map(offsets: NDArray[np.int64], marks: NDArray[np.bool_] | None, *, vocab_size: int | None) -> None:
    """Check a vocabulary map: `offsets` [Vd] is d2t, `marks` [V] is t2d where the file holds it.

    Raises CheckpointError for absolute ids, ids outside the vocabulary, ids that repeat, and marks that name others.
    """
    rows = np.arange(len(offsets), dtype=np.int64)
    ids = rows + offsets
    size = len(marks) if marks is not None else vocab_size
    if marks is not None and vocab_size is not None and len(marks) != vocab_size:
        raise CheckpointError(f"t2d has {len(marks)} entries, but the vocabulary has {vocab_size}.", _SAME)
    marked = np.flatnonzero(marks) if marks is not None else None
    if _looks_absolute(offsets, ids, marked, size):
        raise CheckpointError(
            f"{VOCABULARY_MAP} holds absolute ids (entry 0 is {offsets[0]}, entry {len(offsets) - 1} is {offsets[-1]}), expected offsets.",
            "Save offsets: the target's id minus the row's own number.",
        )
    outside = np.flatnonzero((ids < 0) | (ids >= size)) if size is not None else np.flatnonzero(ids < 0)
    if len(outside):
        row = int(outside[0])
        raise CheckpointError(
            f"{VOCABULARY_MAP}[{row}] is {offsets[row]}, so row {row} would be the target's id {ids[row]}, outside its vocabulary"
            + (f" of {size}." if size is not None else "."),
            _SAME,
        )
    repeats = np.flatnonzero(np.diff(np.sort(ids)) == 0)
    if len(repeats):
        twice = int(np.sort(ids)[repeats[0]])
        raise CheckpointError(f"{VOCABULARY_MAP} names the target's id {twice} in two rows.", _SAME)
    if marked is not None and not np.array_equal(np.sort(ids), marked):
        other = int(np.setxor1d(ids, marked)[0])
        raise CheckpointError(f"{VOCABULARY_MAP} and t2d disagree: only one of them names the target's id {other}.", _SAME)


def _looks_absolute(
    offsets: NDArray[np.int64], ids: NDArray[np.int64], marked: NDArray[np.intp] | None, size: int | None
) -> bool:
    """Whether the entries are ids themselves. Offsets repeat along runs of kept ids; absolute ids never do."""
    if marked is not None:
        return bool(np.array_equal(np.sort(offsets), marked) and not np.array_equal(np.sort(ids), marked))
    increasing = len(offsets) > 1 and bool(np.all(np.diff(offsets) > 0)) and offsets[0] >= 0
    return increasing and (size is None or bool(offsets[-1] < size))
