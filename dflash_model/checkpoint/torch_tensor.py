"""Tensors as a pickle describes them: which storage, from where, in which steps. Also why some cannot be read.

A tensor that cannot be read is a `Refusal`, not an error: an odd object in the optimizer's state must not stand in the way
of the drafter. Strides and offsets count elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_model.checkpoint.dtypes import FROM_STORAGE, FROM_TORCH, ITEM_BYTES
from dflash_model.checkpoint.symbols import Global, Node, PersistentId, attributes

MAX_DIMENSIONS = 64
MAX_WRAPPERS = 8
EXPANDED_BYTES = 16 << 20
"""A tensor may be larger than its storage (stride 0) up to this size; past it a file of bytes could ask for terabytes."""

PathKey = tuple[str, ...]
"""Where an object stands: the dict keys and list positions from the top of the file."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tensor (or whole module) that cannot be read."""

    reason: str
    """What it is, as the end of a sentence that starts with the tensor's name."""

    fix: str
    """What the user can do; a whole sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """A strided tensor over a storage."""

    dtype: str
    """safetensors dtype name."""

    shape: tuple[int, ...]
    """Sizes; () for a scalar."""

    stride: tuple[int, ...]
    """Steps in elements, one per dimension."""

    storage_offset: int
    """First element within the storage."""

    storage_key: str
    """The storage's name in the file."""

    storage_bytes: int
    """Size that the pickle claims for the storage."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor when it lies alone and in order."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def span(self) -> tuple[int, int]:
        """(first byte, number of bytes) of the storage's part that the elements lie in; (0, 0) for an empty tensor."""
        if self.numel == 0:
            return 0, 0
        item = ITEM_BYTES[self.dtype]
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.storage_offset * item, (last + 1) * item

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in the storage one after the other, in order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return self.numel == 0
            expected *= size
        return True


_EXPORT = "Save a plain state dict of dense tensors (detached, gathered, dequantized) on the training host."


def read_tensor(value: object) -> Geometry | Refusal | None:
    """The tensor that `value` describes, why it cannot be read, or None where it is no tensor at all."""
    if not isinstance(value, Node) or not isinstance(value.called, Global):
        return None
    for _ in range(MAX_WRAPPERS):
        rule = _RULES.get(value.called.name) if value.called.module in _TORCH_MODULES else None
        if rule is None:
            return _refuse_other(value)
        args = value.args if isinstance(value.args, tuple) else ()
        found = rule(args)
        if not isinstance(found, Node):
            return found
        if not isinstance(found.called, Global):
            return Refusal("is rebuilt by something that has no name", _EXPORT)
        value = found
    return Refusal("is wrapped too many times", _EXPORT)


_TORCH_MODULES = ("torch._utils", "torch._tensor", "torch.nn.parameter")
_MODULE_MARKS = ("_modules", "_parameters", "_buffers")
_ARRAYS = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy._core.numeric._frombuffer")


def _refuse_other(node: Node) -> Refusal | None:
    state = attributes(node)
    if all(mark in state for mark in _MODULE_MARKS):
        return Refusal(
            f"is a whole nn.Module ({node.type_name}), saved without its state dict", "Save module.state_dict() instead."
        )
    name = node.type_name
    if name in _ARRAYS:
        return Refusal("is a numpy array, not a tensor", "Save it as a torch tensor.")
    if name.startswith("torch._utils._rebuild_"):
        return Refusal(f"is rebuilt by {name}, which is not known here", _EXPORT)
    return None


def _rebuild_v1(args: tuple[Any, ...]) -> Geometry | Refusal:
    return _strided(args, dtype=None, metadata=None)


def _rebuild_v2(args: tuple[Any, ...]) -> Geometry | Refusal:
    return _strided(args, dtype=None, metadata=args[6] if len(args) > 6 else None)


def _rebuild_v3(args: tuple[Any, ...]) -> Geometry | Refusal:
    if len(args) < 7:
        return _malformed("its dtype is missing")
    return _strided(args, dtype=args[6], metadata=args[7] if len(args) > 7 else None)


def _rebuild_parameter(args: tuple[Any, ...]) -> Node | Refusal:
    if args and isinstance(args[0], Node):
        return args[0]
    return _malformed("a parameter without data")


def _rebuild_from_type(args: tuple[Any, ...]) -> Node | Refusal:
    if len(args) < 3 or not isinstance(args[1], Global):
        return _malformed("a tensor type without a name")
    kind = args[1]
    if kind.name == "DTensor":
        return _refuse_dtensor(args)
    if (kind.module, kind.name) not in _PLAIN_TYPES:
        return Refusal(f"is of the tensor subclass {kind.dotted}", _EXPORT)
    return Node(args[0], args[2])


_PLAIN_TYPES = {
    ("torch", "Tensor"),
    ("torch._tensor", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
}


def _rebuild_wrapper(args: tuple[Any, ...]) -> Refusal:
    kind = args[0] if args else None
    if isinstance(kind, Global) and kind.name == "DTensor":
        return _refuse_dtensor(args)
    name = kind.dotted if isinstance(kind, Global) else "?"
    return Refusal(f"is of the tensor subclass {name}", _EXPORT)


def _refuse_dtensor(_: tuple[Any, ...]) -> Refusal:
    return Refusal(
        "is a DTensor, of which this file holds one rank's part",
        "Save a full state dict, or give the torch.distributed.checkpoint directory.",
    )


def _refusing(reason: str) -> Callable[[tuple[Any, ...]], Refusal]:
    return lambda _: Refusal(reason, _EXPORT)


_RULES: dict[str, Callable[[tuple[Any, ...]], Geometry | Refusal | Node]] = {
    "_rebuild_tensor": _rebuild_v1,
    "_rebuild_tensor_v2": _rebuild_v2,
    "_rebuild_tensor_v3": _rebuild_v3,
    "_rebuild_parameter": _rebuild_parameter,
    "_rebuild_parameter_with_state": _rebuild_parameter,
    "_rebuild_from_type": _rebuild_from_type,
    "_rebuild_from_type_v2": _rebuild_from_type,
    "_rebuild_wrapper_subclass": _rebuild_wrapper,
    "_rebuild_sparse_tensor": _refusing("is a sparse tensor"),
    "_rebuild_sparse_csr_tensor": _refusing("is a sparse tensor"),
    "_rebuild_nested_tensor": _refusing("is a nested tensor"),
    "_rebuild_qtensor": _refusing("is a quantized tensor"),
    "_rebuild_meta_tensor_no_storage": _refusing("is a meta tensor: it has a shape and no data"),
    "_rebuild_device_tensor_from_numpy": _refusing("is a device tensor that torch saved by way of numpy"),
    "_rebuild_device_tensor_from_cpu_tensor": _refusing("is a device tensor that torch saved by way of the CPU"),
}


def _malformed(detail: str) -> Refusal:
    return Refusal(f"is described in a way that torch never writes: {detail}", "Save the checkpoint again with torch.save.")


def _strided(args: tuple[Any, ...], *, dtype: object, metadata: object) -> Geometry | Refusal:
    if len(args) < 4 or not isinstance(args[0], PersistentId):
        return _malformed("it has no storage")
    flags = [str(key) for key, value in metadata.items() if value is True] if isinstance(metadata, dict) else []
    if flags:
        return Refusal(f"is a lazy view of its storage ({', '.join(flags)[:80]})", "Call resolve_conj() and resolve_neg() first.")
    storage = _storage(args[0].value)
    if isinstance(storage, Refusal):
        return storage
    key, storage_dtype, numel = storage
    if dtype is not None:
        found = FROM_TORCH.get(dtype.name) if isinstance(dtype, Global) and dtype.module == "torch" else None
        if found is None:
            return Refusal(
                f"has the dtype {dtype.dotted if isinstance(dtype, Global) else '?'}, which safetensors lacks", _EXPORT
            )
    else:
        found = storage_dtype
    if found is None:
        return _malformed("an untyped storage without a dtype")
    shape, stride = args[2], args[3]
    if not _naturals(shape) or not _naturals(stride) or not _naturals((args[1],)) or len(shape) != len(stride):
        return _malformed("its sizes are no sizes")
    if len(shape) > MAX_DIMENSIONS:
        return _malformed(f"it has more than {MAX_DIMENSIONS} dimensions")
    geometry = Geometry(
        dtype=found, shape=shape, stride=stride, storage_offset=args[1], storage_key=key,
        storage_bytes=numel * (ITEM_BYTES[storage_dtype] if storage_dtype else 1),
    )  # fmt: skip
    return _check_extent(geometry)


def _naturals(value: object) -> bool:
    return isinstance(value, tuple) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _storage(identifier: object) -> tuple[str, str | None, int] | Refusal:
    """(key, dtype or None for an untyped storage, elements) of a persistent id."""
    match identifier:
        case ("storage", Global() as kind, str() as key, str(), int() as numel, None) | (
            "storage", Global() as kind, str() as key, str(), int() as numel,
        ) if type(numel) is int and 0 <= numel < 1 << 62:  # fmt: skip
            pass
        case ("storage", _, _, _, _, _):
            return Refusal("is a view that only torch before 0.4 wrote", "Load and save it again with a newer torch.")
        case _:
            return _malformed("its storage is no storage")
    if kind.name == "UntypedStorage":
        return key, None, numel
    if kind.name not in FROM_STORAGE:
        reason = (
            "is a quantized tensor"
            if kind.name.startswith("Q")
            else f"has the storage type {kind.dotted}, which safetensors lacks"
        )
        return Refusal(reason, _EXPORT)
    return key, FROM_STORAGE[kind.name], numel


def _check_extent(geometry: Geometry) -> Geometry | Refusal:
    first, size = geometry.span
    if first + size > geometry.storage_bytes:
        return _malformed(f"it reaches to byte {first + size} of a storage of {geometry.storage_bytes}")
    if geometry.size_bytes > max(geometry.storage_bytes, EXPANDED_BYTES):
        return Refusal(
            f"repeats its {geometry.storage_bytes} bytes of storage to {geometry.size_bytes} bytes",
            "Save it after .contiguous().",
        )
    return geometry
