"""The symbolic unpickler: reads any pickle and runs nothing. It never imports, never calls, never hashes foreign objects.

Classes and functions become `Global`, calls become `Node`; only dict, OrderedDict, defaultdict, set, torch.Size, bytes and
complex are interpreted. Work and memory are bounded: a pickle that asks for more is refused with a sentence.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import IO, Any

from dflash_model.checkpoint.interpreted import NOT_INTERPRETED, interpret
from dflash_model.checkpoint.pickle_stack import (
    COST_CONTAINER,
    COST_DICT,
    COST_ENTRY,
    COST_NODE,
    COST_SCALAR,
    COST_SET,
    Limits,
    PickleStack,
    refused,
    too_large,
)
from dflash_model.checkpoint.symbols import Global, Members, Node, PersistentId, dict_key
from dflash_model.errors import CheckpointError

HIGHEST_PROTOCOL = 5
DEFAULT_LIMITS = Limits()

_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_FLOATS = ("FLOAT", "BINFLOAT")
_INTEGERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4")
_TEXTS = (
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
)  # fmt: skip
_REFUSED = {
    "INST": "makes instances in a way that only Python 1 and 2 used",
    "OBJ": "makes instances in a way that only Python 1 and 2 used",
    "EXT1": "uses the extension registry",
    "EXT2": "uses the extension registry",
    "EXT4": "uses the extension registry",
    "PERSID": "names outside objects by text, which torch never writes",
    "NEXT_BUFFER": "expects buffers from outside the file",
    "READONLY_BUFFER": "expects buffers from outside the file",
}


def load_symbolic(pickle: bytes | IO[bytes], *, what: str, limits: Limits = DEFAULT_LIMITS) -> Any:
    """The object that a pickle describes, as inert data; a stream is left just behind its STOP.

    `what` names the pickle in messages. Raises CheckpointError where it is damaged, refused or too large.
    """
    if isinstance(pickle, bytes) and len(pickle) > limits.pickle_bytes:
        raise too_large(what, f"is {len(pickle)} bytes long, more than {limits.pickle_bytes}")
    machine = _Machine(PickleStack(what, limits))
    try:
        return machine.run(io.BytesIO(pickle) if isinstance(pickle, bytes) else pickle)
    except (ValueError, IndexError, KeyError, OverflowError, Warning, _Malformed) as exc:
        # pickletools says ValueError for cut or malformed arguments (and warns of escapes in names, which matters where
        # warnings are errors); an empty stack or unknown memo number ends here too.
        raise CheckpointError(
            f"{what} is not a readable pickle: {_reason(exc)}.",
            "The file is damaged or truncated; copy or save the checkpoint again.",
        ) from exc


def _reason(exc: Exception) -> str:
    match exc:
        case KeyError():
            return "it uses an object that it never stored"
        case IndexError():
            return "an operation lacks its operands"
        case _:
            return str(exc)[:120]


class _Malformed(Exception):
    """An operation that its operands do not allow."""


class _Machine:
    """One run over inert data. A handler takes the opcode's argument (None where it has none)."""

    def __init__(self, stack: PickleStack) -> None:
        """A run that starts from `stack`."""
        self.stack = stack
        self.handlers = self._handlers()

    def run(self, stream: IO[bytes]) -> Any:
        handlers = self.handlers
        what, most = self.stack.what, self.stack.limits.opcodes
        left = most
        for opcode, arg, _ in pickletools.genops(stream):
            left -= 1
            if left < 0:
                raise too_large(what, f"holds more than {most} pickle operations")
            handler = handlers.get(opcode.name)
            if handler is None:
                raise refused(what, _REFUSED.get(opcode.name, f"uses the pickle operation {opcode.name}"))
            handler(arg)
        return self.stack.result()

    def _handlers(self) -> dict[str, Callable[[Any], object]]:
        stack = self.stack
        own: dict[str, Callable[[Any], object]] = {
            "PROTO": self._proto, "FRAME": lambda _: None, "STOP": lambda _: None,
            "MARK": lambda _: stack.mark(), "POP": self._pop, "POP_MARK": lambda _: stack.pop_to_mark(),
            "DUP": lambda _: stack.push(stack.top[-1], COST_SCALAR),
            "GET": stack.get, "BINGET": stack.get, "LONG_BINGET": stack.get,
            "PUT": stack.put, "BINPUT": stack.put, "LONG_BINPUT": stack.put, "MEMOIZE": lambda _: stack.put(len(stack.memo)),
            "EMPTY_LIST": lambda _: stack.push([], COST_CONTAINER), "EMPTY_DICT": lambda _: stack.push({}, COST_DICT),
            "EMPTY_SET": lambda _: stack.push(Members([]), COST_SET),
            "LIST": lambda _: stack.push(stack.pop_to_mark(), COST_CONTAINER),
            "TUPLE": lambda _: stack.push(tuple(stack.pop_to_mark()), COST_CONTAINER),
            "FROZENSET": lambda _: stack.push(Members(stack.pop_to_mark()), COST_SET),
            "TUPLE1": lambda _: self._short_tuple(1), "TUPLE2": lambda _: self._short_tuple(2),
            "TUPLE3": lambda _: self._short_tuple(3), "DICT": self._dict,
            "APPEND": lambda _: self._extend([stack.pop()]), "APPENDS": lambda _: self._extend(stack.pop_to_mark()),
            "ADDITEMS": lambda _: self._extend(stack.pop_to_mark()),
            "SETITEM": self._set_one, "SETITEMS": lambda _: self._set_all(stack.pop_to_mark()),
            "GLOBAL": self._global, "STACK_GLOBAL": self._stack_global, "REDUCE": self._reduce,
            "NEWOBJ": self._new, "NEWOBJ_EX": self._new_with_keywords, "BUILD": self._build, "BINPERSID": self._persistent,
        }  # fmt: skip
        own |= {name: self._constant(value) for name, value in _CONSTANTS.items()}
        own |= dict.fromkeys(_FLOATS, lambda value: stack.push(value, COST_SCALAR))
        return own | dict.fromkeys(_INTEGERS, self._integer) | dict.fromkeys(_TEXTS, self._text)

    def _proto(self, version: int) -> None:
        if version > HIGHEST_PROTOCOL:
            raise refused(self.stack.what, f"is of pickle protocol {version}, which is not known here")

    def _constant(self, value: object) -> Callable[[Any], None]:
        return lambda _: self.stack.push(value, COST_SCALAR)

    def _integer(self, value: int) -> None:
        longest = self.stack.limits.integer_bytes
        if value.bit_length() > 8 * longest:
            raise too_large(self.stack.what, f"holds an integer of more than {longest} bytes")
        self.stack.push(value, value.__sizeof__())

    def _text(self, value: str | bytes | bytearray) -> None:
        self.stack.push(bytes(value) if isinstance(value, bytearray) else value, 8 + value.__sizeof__())

    def _short_tuple(self, size: int) -> None:
        top = self.stack.top
        if len(top) < size:
            raise IndexError("a tuple of more members than there are")
        members = tuple(top[-size:])
        del top[-size:]
        self.stack.push(members, COST_CONTAINER)

    def _dict(self, _: Any) -> None:
        members = self.stack.pop_to_mark()
        self.stack.push({}, COST_DICT)
        self._set_all(members)

    def _pop(self, _: Any) -> None:
        if self.stack.top:
            self.stack.pop()
        else:
            self.stack.pop_to_mark()

    def _extend(self, values: list[Any]) -> None:
        target = self.stack.top[-1]
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, Members):
            target.items.extend(values)
        elif isinstance(target, Node):
            target.items = target.items or []
            target.items.extend(values)
        else:
            raise _Malformed("items are appended to something that is no list")

    def _set_one(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        target = self.stack.top[-1]
        if isinstance(target, dict):
            self.stack.charge(COST_ENTRY)
            target[dict_key(key)] = value
        else:
            self._set_all([key, value])

    def _set_all(self, members: list[Any]) -> None:
        target = self.stack.top[-1]
        if len(members) % 2:
            raise _Malformed("a key stands without a value")
        self.stack.charge(COST_ENTRY * (len(members) // 2))
        pairs = zip(members[::2], members[1::2], strict=True)
        if isinstance(target, dict):
            target.update((dict_key(key), value) for key, value in pairs)
        elif isinstance(target, Node):
            target.pairs = target.pairs or []
            target.pairs.extend(pairs)
        else:
            raise _Malformed("keys are set on something that is no dict")

    def _global(self, text: str) -> None:
        module, _, name = text.partition(" ")
        self.stack.push(Global.named(module, name), COST_CONTAINER + len(text))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _Malformed("a class is named by something that is not text")
        self.stack.push(Global.named(module, name), COST_CONTAINER)

    def _reduce(self, _: Any) -> None:
        args, called = self.stack.pop(), self.stack.pop()
        value = interpret(called, args, self.stack.charge)
        if value is NOT_INTERPRETED:
            self.stack.push(Node(called, args), COST_NODE)
        else:
            self.stack.top.append(value)

    def _new(self, _: Any) -> None:
        args, cls = self.stack.pop(), self.stack.pop()
        self.stack.push(Node(cls, args), COST_NODE)

    def _new_with_keywords(self, _: Any) -> None:
        kwargs, args, cls = self.stack.pop(), self.stack.pop(), self.stack.pop()
        self.stack.push(Node(cls, args, kwargs), COST_NODE)

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        target = self.stack.top[-1]
        if isinstance(target, Node):
            target.state = state  # On a dict it is an attribute beside the content (`_metadata` of a state dict): no use for it.

    def _persistent(self, _: Any) -> None:
        self.stack.push(PersistentId(self.stack.pop()), COST_CONTAINER)
