"""Tensor element types by their safetensors names, and the one cast that extraction offers.

numpy has no bfloat16 or float8, so bytes are moved as unsigned integers of the same width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""safetensors dtype name -> bytes of one element. Types of less than a byte are not read."""

FROM_TORCH: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32",
    "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64",
}  # fmt: skip
"""Name of a torch.dtype -> safetensors dtype name."""

FROM_STORAGE: dict[str, str] = {
    "BoolStorage": "BOOL", "ByteStorage": "U8", "CharStorage": "I8", "ShortStorage": "I16", "HalfStorage": "F16",
    "BFloat16Storage": "BF16", "IntStorage": "I32", "FloatStorage": "F32", "LongStorage": "I64", "DoubleStorage": "F64",
    "ComplexFloatStorage": "C64",
}  # fmt: skip
"""Name of a typed torch storage class -> safetensors dtype name."""

STORAGE_ITEM_BYTES: dict[str, int] = {name: ITEM_BYTES[dtype] for name, dtype in FROM_STORAGE.items()} | {
    "UntypedStorage": 1, "ComplexDoubleStorage": 16, "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4,
    "QUInt4x2Storage": 1, "QUInt2x4Storage": 1,
}  # fmt: skip
"""Name of any torch storage class -> bytes of one element, also of those whose tensors are refused."""

CAST_TO_BF16 = frozenset({"F32", "F16", "F64"})
"""What a cast to bf16 changes; every other type is kept as it is."""

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def as_integers(data: bytes, item_bytes: int) -> npt.NDArray[Any]:
    """The elements of `data` [n * item_bytes] as little-endian unsigned integers [n], without a copy."""
    return np.frombuffer(data, dtype=np.dtype(_UNSIGNED[item_bytes]).newbyteorder("<"))


def to_bf16(data: bytes, dtype: str) -> bytes:
    """Elements of `dtype` (F32, F16 or F64) as bfloat16, rounded to nearest even; every NaN becomes 0x7FC0.

    Equal to torch's `.bfloat16()`, whose NaNs differ in their bits between its own code paths.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # F64 beyond F32's range becomes infinite, as in torch
        values = np.frombuffer(data, dtype={"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype]).astype("<f4", copy=False)
    bits = values.view("<u4")
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype("<u2")).astype("<u2").tobytes()
