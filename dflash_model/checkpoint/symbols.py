"""What a pickle says, as inert data: names instead of classes, nodes instead of calls.

None of these types compares, hashes or prints its content: foreign objects may be nested without end, may contain
themselves, or may be made so that hashing them takes for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(eq=False, repr=False, slots=True)
class Global:
    """A class or function that the pickle names; it is never looked up."""

    module: str
    """Dotted module name, in Python 3's spelling."""

    name: str
    """Qualified name within the module."""

    @classmethod
    def named(cls, module: str, name: str) -> Global:
        """The global, with the module names of Python 2 put into those of Python 3."""
        return cls(_OLD_MODULES.get(module, module), name)

    @property
    def dotted(self) -> str:
        """`module.name`, cut to 200 characters, for comparisons and messages."""
        return f"{self.module}.{self.name}"[:200]


@dataclass(eq=False, repr=False, slots=True)
class Node:
    """An object that the pickle would have made by a call; everything it would have been made from."""

    called: object
    """What would have been called; a `Global` in honest files."""

    args: object
    """Its positional arguments; a tuple in honest files."""

    kwargs: object = None
    """Its keyword arguments (NEWOBJ_EX), or None."""

    state: Any = None
    """What BUILD would have set, or None."""

    items: list[Any] | None = None
    """What would have been appended or added to it."""

    pairs: list[tuple[Any, Any]] | None = None
    """What would have been set on it by key."""

    @property
    def type_name(self) -> str:
        """Dotted name of what would have been called, "?" where that is no plain name."""
        return self.called.dotted if isinstance(self.called, Global) else "?"

    def called_is(self, module: str, name: str) -> bool:
        """Whether it would have been made by calling exactly `module.name`."""
        return isinstance(self.called, Global) and (self.called.module, self.called.name) == (module, name)


@dataclass(eq=False, repr=False, slots=True)
class PersistentId:
    """An object that lives outside the pickle: a tensor storage."""

    value: object
    """The identifier that the pickle gives."""


@dataclass(eq=False, repr=False, slots=True)
class Key:
    """A dict key that is neither text nor bytes. It hashes by identity: foreign hashes can be made to collide."""

    value: object
    """The key as the pickle has it."""


@dataclass(eq=False, repr=False, slots=True)
class Members:
    """A set's members, not hashed."""

    items: list[Any]
    """In the file's order; may repeat."""


def attributes(node: Node) -> dict[str, Any]:
    """The attributes that BUILD would set: from a dict state, or from the (dict, slots dict) pair that slots classes have."""
    halves = node.state if isinstance(node.state, tuple) and len(node.state) == 2 else (node.state,)
    found: dict[str, Any] = {}
    for half in halves:
        if isinstance(half, dict):
            found.update((key, value) for key, value in half.items() if isinstance(key, str))
    return found


def dict_key(key: object) -> object:
    """How `key` is kept in a dict: text and bytes as they are (their hashes are salted), anything else as a `Key`."""
    return key if isinstance(key, str | bytes) else Key(key)
