"""Where the tensors of an unpickled object stand: a walk over dicts, lists and dict-like objects, by path.

The walk is a loop with a budget: foreign objects may nest without end, contain themselves, or unfold exponentially.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dflash_model.checkpoint.symbols import Key, Node
from dflash_model.checkpoint.torch_tensor import Geometry, PathKey, Refusal, read_tensor
from dflash_model.errors import CheckpointError

MAX_DEPTH = 32
MAX_VISITS = 600_000
_HOLDERS = (dict, list, tuple, Node)


@dataclass(frozen=True, slots=True)
class FoundTensors:
    """Every tensor of one object, in the file's order."""

    readable: dict[PathKey, Geometry] = field(default_factory=dict)
    """Path -> tensor."""

    refused: dict[PathKey, Refusal] = field(default_factory=dict)
    """Path -> why it cannot be read."""


def find_tensors(root: object, what: str) -> FoundTensors:
    """Walk `root`; containers deeper than MAX_DEPTH are left out. Raises CheckpointError where it unfolds beyond reason."""
    found = FoundTensors()
    left = MAX_VISITS
    pending: list[tuple[PathKey, Any]] = [((), root)]
    while pending:
        path, value = pending.pop()
        tensor = read_tensor(value)
        if tensor is not None:
            _add(found, path, tensor)
            continue
        members = _members(value)
        holding = [(key, item) for key, item in members if isinstance(item, _HOLDERS)]
        left -= 1 + len(holding) + len(members) // 4  # numbers and texts are passed over quickly
        if left < 0:
            raise CheckpointError(f"{what} nests its containers beyond reason.", "Save the drafter's state dict alone.")
        if len(path) < MAX_DEPTH:
            # Reversed, since the last is taken first: the order of the file is kept.
            pending.extend(((*path, path_part(key)), item) for key, item in reversed(holding))
    return found


def _add(found: FoundTensors, path: PathKey, tensor: Geometry | Refusal) -> None:
    if path in found.readable or path in found.refused:
        found.readable.pop(path, None)
        found.refused[path] = Refusal("stands twice under the same name", "Save the checkpoint with distinct text keys.")
    elif isinstance(tensor, Refusal):
        found.refused[path] = tensor
    else:
        found.readable[path] = tensor


def _members(value: object) -> Collection[tuple[object, Any]]:
    """(key, member) of a container; list positions are the keys of lists."""
    match value:
        case dict():
            return value.items()
        case list() | tuple():
            return list(enumerate(value))
        case Node(pairs=list() as pairs):
            return pairs
        case Node(items=list() as items):
            return list(enumerate(items))
        case _:
            return ()


def path_part(key: object) -> str:
    """A dict key or list position as one component of a path; "?" for keys that are neither text nor numbers."""
    match key:
        case int():
            return str(key)
        case str():
            return key
        case bytes():
            return key.decode("utf-8", "replace")
        case Key(value=None | bool() | int() | float() as plain):
            return str(plain)
        case _:
            return "?"
