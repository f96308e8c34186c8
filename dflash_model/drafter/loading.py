"""Loading: a safetensors file into a Drafter, strictly. Every tensor of the file is consumed, and every weight comes from it.

The model is built on the meta device, so a weight that the file lacks can never be a random one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.geometry import listed
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.support import refuse_unsupported
from dflash_model.drafter.tables import target_ids_of
from dflash_model.errors import CheckpointError, from_os_error

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_STORED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
VOCABULARY_MAP = "d2t"
_VOCABULARY_TABLES = ("embed_tokens.weight", "candidate_selector.predecessor_codebook")
_AGAIN = "Relay the checkpoint again; if it stays so, look at the training run that wrote it."


def load_drafter(weights: Path, spec: DrafterSpec, *, dtype: torch.dtype = torch.float32) -> Drafter:
    """Read the drafter of `spec` from the safetensors file `weights`; it computes in `dtype`, whatever the file holds.

    Raises ConfigError naming what the backbone cannot run; CheckpointError naming tensors that are missing, unexpected, of
    a wrong shape or type, or not finite; an EvalError where the file cannot be read; ValueError for a `dtype` that
    overflows or is no float.
    """
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(f"dtype {dtype}, expected one of {COMPUTE_DTYPES}")
    refuse_unsupported(spec, str(weights))
    with _opened(weights) as file:
        names = set(file.keys())
        with torch.device("meta"):
            drafter = Drafter(_with_vocabulary(spec, file, names), name=str(weights))
        expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
        _compare_names(weights, names, set(expected))
        tensors = {name: _checked(weights, name, file.get_tensor(name), expected[name], dtype) for name in sorted(names)}
    drafter.load_state_dict(tensors, strict=True, assign=True)
    if drafter.d2t is not None:
        target_ids_of(drafter.d2t, vocab_size=spec.vocab_size, name=str(weights))
    return drafter.requires_grad_(False).eval()


@contextmanager
def _opened(weights: Path) -> Iterator[Any]:
    try:
        weights.stat()  # safe_open's own OSError carries no errno
        with safe_open(weights, framework="pt") as file:
            yield file
    except SafetensorError as exc:
        raise CheckpointError(f"{weights} is not a whole safetensors file: {exc}.", _AGAIN) from exc
    except OSError as exc:
        raise from_os_error(exc, f"reading {weights}") from exc


def _with_vocabulary(spec: DrafterSpec, file: Any, names: set[str]) -> DrafterSpec:
    """`spec` with the vocabulary that the drafter's own tables have, where its config states none."""
    whole_head = () if spec.draft_vocab_size is not None else ("lm_head.weight",)
    tables = [name for name in (*_VOCABULARY_TABLES, *whole_head) if name in names]
    if spec.vocab_size is not None or not tables:
        return spec
    return replace(spec, vocab_size=int(file.get_slice(tables[0]).get_shape()[0]))


def _compare_names(weights: Path, names: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - names):
        raise CheckpointError(f"{weights} lacks {len(missing)} of the drafter's tensors: {listed(missing)}.", _AGAIN)
    if unexpected := sorted(names - expected):
        raise CheckpointError(
            f"{weights} holds {len(unexpected)} tensors that the drafter does not use: {listed(unexpected)}.",
            "Check that file and config belong together; an unused tensor means another model.",
        )


def _checked(weights: Path, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{name} in {weights} has shape {list(tensor.shape)}, but the config asks for {list(shape)}.",
            "Check that file and config belong together.",
        )
    if name == VOCABULARY_MAP:
        return _checked_map(weights, tensor)
    if tensor.dtype not in _STORED_DTYPES:
        raise CheckpointError(
            f"{name} in {weights} is stored as {str(tensor.dtype).removeprefix('torch.')}.",
            "Export the drafter in fp32, bf16 or fp16; quantised weights are not supported.",
        )
    converted = tensor.to(dtype)
    if not bool(torch.isfinite(converted).all()):
        raise CheckpointError(f"{name} in {weights} holds NaN or infinite values.", _AGAIN)
    return converted


def _checked_map(weights: Path, d2t: Tensor) -> Tensor:
    if d2t.dtype not in (torch.int64, torch.int32):
        raise CheckpointError(
            f"{VOCABULARY_MAP} in {weights} is stored as {str(d2t.dtype).removeprefix('torch.')}.",
            "Export it as int64: offsets from a row of the drafter's head to the token it speaks of.",
        )
    return d2t.long()
