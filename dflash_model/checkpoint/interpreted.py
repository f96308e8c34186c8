"""The few calls in a pickle that are carried out on its data: containers, sizes, bytes and complex numbers.

Each is done here by hand on inert data, and charged before it is done: a memoised argument can be used again and again
at two bytes a time.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_model.checkpoint.symbols import Global, Members, dict_key

_CONTAINER_BYTES = 96
_PAIR_BYTES = 240


NOT_INTERPRETED = object()
"""What `interpret` answers for every other call."""

Charge = Callable[[int], None]
"""Called with the bytes that a call is about to occupy; raises where that is too much."""


def interpret(called: object, args: object, charge: Charge) -> object:
    """The value of `called(*args)` where it is one of the known plain calls with plain arguments, else NOT_INTERPRETED."""
    if not isinstance(called, Global) or not isinstance(args, tuple):
        return NOT_INTERPRETED
    rule = _RULES.get((called.module, called.name))
    if rule is None:
        return NOT_INTERPRETED
    charge(_CONTAINER_BYTES)
    return rule(args, charge)


def _mapping(args: tuple[object, ...], charge: Charge) -> object:
    if not args:
        return {}
    pairs = args[0]
    if len(args) != 1 or not isinstance(pairs, list):
        return NOT_INTERPRETED
    charge(_PAIR_BYTES * len(pairs))
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return NOT_INTERPRETED
    return {dict_key(key): value for key, value in pairs}


def _default_mapping(args: tuple[object, ...], charge: Charge) -> object:
    return {} if len(args) <= 1 else NOT_INTERPRETED


def _size(args: tuple[object, ...], charge: Charge) -> object:
    return args[0] if len(args) == 1 and isinstance(args[0], tuple) else NOT_INTERPRETED


def _members(args: tuple[object, ...], charge: Charge) -> object:
    if not args:
        return Members([])
    return Members(args[0]) if len(args) == 1 and isinstance(args[0], list) else NOT_INTERPRETED


def _latin1(args: tuple[object, ...], charge: Charge) -> object:
    if len(args) != 2 or not isinstance(args[0], str) or args[1] not in ("latin1", "latin-1"):
        return NOT_INTERPRETED
    charge(len(args[0]))
    try:
        return args[0].encode("latin-1")
    except UnicodeEncodeError:
        return NOT_INTERPRETED


def _bytes(args: tuple[object, ...], charge: Charge) -> object:
    if not args:
        return b""
    if len(args) == 1 and isinstance(args[0], bytes):
        return args[0]
    return _latin1(args, charge)


def _complex(args: tuple[object, ...], charge: Charge) -> object:
    match args:
        case (float() as real, float() as imaginary):
            return complex(real, imaginary)
    return NOT_INTERPRETED


_RULES: dict[tuple[str, str], Callable[[tuple[object, ...], Charge], object]] = {
    ("collections", "OrderedDict"): _mapping,
    ("builtins", "dict"): _mapping,
    ("collections", "defaultdict"): _default_mapping,
    ("torch", "Size"): _size,
    ("builtins", "set"): _members,
    ("builtins", "frozenset"): _members,
    ("_codecs", "encode"): _latin1,
    ("builtins", "bytearray"): _bytes,
    ("builtins", "bytes"): _bytes,
    ("builtins", "complex"): _complex,
}
