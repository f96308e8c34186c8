"""The stack, marks and memo of the pickle machine, and the limits that everything put on them is charged against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash_model.errors import CheckpointError

MEMO_SLACK = 1024

COST_SCALAR = 24
COST_CONTAINER = 80
COST_DICT = 240
COST_SET = 240
COST_MEMO = 120
COST_NODE = 180
COST_ENTRY = 96
"""Estimated bytes of one object of each kind, with its place on the stack."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one pickle may cost. 20,000 tensors cost 0.6 million opcodes and 40 MB."""

    pickle_bytes: int = 32 << 20
    """Longest pickle that is looked at."""

    opcodes: int = 1_250_000
    """Most opcodes: a second of work, or 40,000 tensors."""

    memory_bytes: int = 180_000_000
    """Estimate of what its objects may occupy."""

    integer_bytes: int = 1024
    """Longest integer; Python's own limit on printing one is a little higher."""


def too_large(what: str, detail: str) -> CheckpointError:
    """The error for a pickle that asks for more than `Limits` allow."""
    return CheckpointError(f"{what} {detail}.", "Save the drafter's state dict without other large Python objects.")


def refused(what: str, detail: str) -> CheckpointError:
    """The error for a pickle that asks for something that no honest checkpoint needs."""
    return CheckpointError(f"{what} {detail}; it is refused.", "Save the drafter with torch.save of its state dict.")


class PickleStack:
    """Stack, marks and memo; an empty one that is read from raises IndexError, an unknown memo number KeyError."""

    def __init__(self, what: str, limits: Limits) -> None:
        """An empty stack; `what` names the pickle in messages."""
        self.what = what
        self.limits = limits
        self.memory_left = limits.memory_bytes
        self.top: list[Any] = []
        """The objects above the last mark."""
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def charge(self, size_bytes: int) -> None:
        """Account for an object of `size_bytes`. Raises CheckpointError past the limit."""
        self.memory_left -= size_bytes
        if self.memory_left < 0:
            raise too_large(self.what, f"describes objects of more than {self.limits.memory_bytes} bytes")

    def push(self, value: object, cost_bytes: int) -> None:
        """Charge and push; the charge is written out, since this is done for nearly every opcode."""
        self.memory_left -= cost_bytes
        if self.memory_left < 0:
            self.charge(0)
        self.top.append(value)

    def pop(self) -> Any:
        """The topmost object above the last mark."""
        return self.top.pop()

    def mark(self) -> None:
        """Put a mark."""
        self.charge(COST_CONTAINER)
        self.marks.append(self.top)
        self.top = []

    def pop_to_mark(self) -> list[Any]:
        """The objects above the last mark; the mark goes too."""
        above = self.top
        self.top = self.marks.pop()
        return above

    def put(self, index: int) -> None:
        """Remember the topmost object by `index`."""
        # Picklers number their memo densely. Sparse numbers would let a file choose colliding hashes.
        if not 0 <= index <= len(self.memo) + MEMO_SLACK:
            raise refused(self.what, "numbers its memo in a way that no pickler does")
        self.charge(COST_MEMO)
        self.memo[index] = self.top[-1]

    def get(self, index: int) -> None:
        """Push the object that was remembered by `index`."""
        self.push(self.memo[index], COST_SCALAR)

    def result(self) -> Any:
        """The one object that a complete pickle leaves. Raises ValueError where there is none or more."""
        if len(self.top) != 1 or self.marks:
            raise ValueError("it ends with an unfinished object")
        return self.top[0]
