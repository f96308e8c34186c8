"""The plain data beside a checkpoint's tensors (step, epoch, arguments) as JSON values.

Tensors are left out, and so are containers that hold nothing else. What the file calls by a class comes out as
{"__type__": "module.Class", ...}; namespaces, paths and numpy numbers come out as what they hold.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from dflash_model.checkpoint.symbols import Global, Key, Members, Node, PersistentId, attributes
from dflash_model.checkpoint.torch_tensor import read_tensor

MAX_VALUES = 100_000
MAX_VISITS = 1_000_000
MAX_DEPTH = 32
MAX_TEXT = 100_000
OMITTED = object()
"""What `Plain.render` answers for a tensor, and for a container of nothing but tensors."""

_NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_NUMPY_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_NUMPY_TYPES = frozenset({"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"})


def render_plain(value: object) -> Any:
    """`value` as a JSON value without its tensors; {} where nothing is left. It never runs or imports anything."""
    rendered = _Renderer().render(value, MAX_DEPTH)
    return {} if rendered is OMITTED else rendered


class _Renderer:
    """One rendering, bounded in values and, since shared containers may unfold without end, in visits.

    Tensors cost visits only: what stands behind many of them in the file must not be cut off.
    """

    def __init__(self) -> None:
        """A rendering that has not begun."""
        self.values_left = MAX_VALUES
        self.visits_left = MAX_VISITS

    @property
    def spent(self) -> bool:
        return self.values_left < 0 or self.visits_left < 0

    def render(self, value: object, depth: int) -> Any:
        self.visits_left -= 1
        if self.spent or depth < 0:
            return {"__type__": "omitted: too large or too deep"}
        match value:
            case list() | tuple():
                return self._list(value, depth)
            case dict():
                return self._dict(value.items(), depth)
            case Members():
                return self._list(value.items, depth)
            case Node():
                return self._node(value, depth)
            case PersistentId():
                return OMITTED
            case _:
                self.values_left -= 1 + (len(value) // 64 if isinstance(value, str) else 0)
                return _leaf(value)

    def _list(self, values: list[Any] | tuple[Any, ...], depth: int) -> Any:
        rendered = []
        for value in values:
            if self.spent:
                rendered.append({"__type__": "omitted: too large"})
                break
            item = self.render(value, depth - 1)
            if item is not OMITTED:
                rendered.append(item)
        return self._kept(rendered) if rendered or not values else OMITTED

    def _dict(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> Any:
        rendered: dict[str, Any] = {}
        empty = True
        for key, value in pairs:
            empty = False
            if self.spent:
                rendered["__omitted__"] = "too large"
                break
            item = self.render(value, depth - 1)
            if item is not OMITTED:
                rendered[_key(key)] = item
        return self._kept(rendered) if rendered or empty else OMITTED

    def _kept(self, container: Any) -> Any:
        self.values_left -= 1
        return container

    def _node(self, node: Node, depth: int) -> Any:
        if read_tensor(node) is not None:
            return OMITTED
        name = node.type_name
        if name in _NAMESPACES:
            return self._dict(attributes(node).items(), depth)
        if name.startswith("pathlib.") and name.endswith("Path"):
            return _path(node)
        if name in _NUMPY_SCALARS:
            return _numpy_scalar(node)
        if name == "collections.Counter" or (node.pairs is not None and node.state is None and not node.args):
            first = node.args[0] if isinstance(node.args, tuple) and node.args else None
            own = first.items() if isinstance(first, dict) else ()
            return self._dict(itertools.chain(own, node.pairs or ()), depth)
        return self._object(node, depth)

    def _object(self, node: Node, depth: int) -> Any:
        rendered: dict[str, Any] = {"__type__": _class_name(node)}
        if node.called_is("copyreg", "_reconstructor"):
            args: object = ()
        else:
            args = node.args
        for label, part in (("args", args), ("kwargs", node.kwargs), ("items", node.items)):
            if part:
                item = self.render(part, depth - 1)
                if item is not OMITTED:
                    rendered[label] = item
        named = attributes(node)
        if not named and node.state is not None:
            item = self.render(node.state, depth - 1)
            if item is not OMITTED:
                rendered["state"] = item
        for part in (named.items(), node.pairs or ()):
            inner = self._dict(part, depth)
            if inner is not OMITTED:
                rendered |= {key: item for key, item in inner.items() if key != "__type__"}
        return rendered


def _leaf(value: object) -> Any:
    match value:
        case None | bool() | int():
            return value
        case str():
            return _text(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return {"__type__": "bytes", "size": len(value)}
        case complex():
            return {"__type__": "complex", "value": str(value)}
        case Global():
            return {"__type__": "name", "name": value.dotted}
        case _:
            return {"__type__": type(value).__name__}


def _class_name(node: Node) -> str:
    """The class of the object: `copyreg._reconstructor(cls, base, state)` names it in its first argument."""
    if node.called_is("copyreg", "_reconstructor") and isinstance(node.args, tuple) and node.args:
        inner = node.args[0]
        return inner.dotted if isinstance(inner, Global) else "?"
    return node.type_name


def _key(key: object) -> str:
    match key:
        case str():
            return _text(key)
        case bytes():
            return _text(key.decode("utf-8", "replace"))
        case Key(value=None | bool() | int() | float() as plain):
            return str(plain)
        case Key(value=tuple() as members) if all(isinstance(member, str | int) for member in members[:8]):
            return "/".join(str(member)[:80] for member in members[:8])
        case _:
            return "?"


def _text(text: str) -> str:
    if len(text) > MAX_TEXT:
        text = text[:MAX_TEXT] + f"... ({len(text)} characters)"
    # Lone surrogates cannot be written as UTF-8.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _path(node: Node) -> Any:
    parts = node.args if isinstance(node.args, tuple) else ()
    if not all(isinstance(part, str) for part in parts):
        return {"__type__": node.type_name}
    joined = "/".join(parts)
    return _text("/" + joined.lstrip("/") if parts and parts[0].startswith("/") else joined) or "."


def _numpy_scalar(node: Node) -> Any:
    match node.args:
        case (Node(called=Global(module="numpy", name="dtype"), args=(str() as code, *_)) as kind, bytes() as data):
            order = kind.state[1] if isinstance(kind.state, tuple) and len(kind.state) > 1 else "|"
            if code not in _NUMPY_TYPES or order not in ("<", ">", "|", "=") or len(data) != int(code[1:]):
                return {"__type__": node.type_name}
            item = np.frombuffer(data, dtype=np.dtype(f"{order}{code}"))[0].item()
            return str(item) if isinstance(item, float) and not math.isfinite(item) else item
    return {"__type__": node.type_name}
