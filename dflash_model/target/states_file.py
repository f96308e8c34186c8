"""A sample's hidden states on disk: one safetensors file with `token_ids` [N] and `hidden_states` [N, L, H].

Names and layout are those of vLLM's and speculators' extraction; there a layer id equals our tap index. What they lack is
in the metadata: which taps, which target, which tokens, which kernels. A reader gets rows only after they were checked.

Shapes: N tokens, L stored taps, T wanted taps, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_model.digests import json_digest
from dflash_model.errors import InputError, StorageError
from dflash_model.target.tensor_file import read_tensors, write_tensors

STATES_VERSION = "1"
CONVENTION = "hidden_states tuple index: k is the output of decoder layer k-1 before the final norm, 0 the embedding output"
DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleStates:
    """One sample's states, checked."""

    sample_id: str
    """The prompt's id."""

    token_ids: tuple[int, ...]
    """[N] the tokens that were fed; row i is the state after token i."""

    tap_indices: tuple[int, ...]
    """[L] tap index of each stored layer, ascending."""

    hidden_states: torch.Tensor
    """[N, L, H] on the CPU, bfloat16 or float32."""

    target_digest: str
    """Digest of the target's weights (TargetFingerprint.weights_digest)."""

    backend: dict[str, Any]
    """Kernels, attention, dtype, device and versions that computed the states."""

    @property
    def token_digest(self) -> str:
        """sha256 over `token_ids`; equal to the reference's."""
        return json_digest(list(self.token_ids))


def write_states(path: Path, states: SampleStates) -> None:
    """Check and write one sample. Raises StorageError where the states are not worth keeping or cannot be written."""
    _check_content(states, path)
    metadata = {
        "format_version": STATES_VERSION,
        "sample_id": states.sample_id,
        "tap_indices": json.dumps(states.tap_indices),
        "convention": CONVENTION,
        "final_norm": "false",
        "dtype": str(states.hidden_states.dtype).removeprefix("torch."),
        "target_digest": states.target_digest,
        "token_digest": states.token_digest,
        "backend": json.dumps(states.backend, sort_keys=True),
    }
    tensors = {"token_ids": torch.tensor(states.token_ids, dtype=torch.int64), "hidden_states": states.hidden_states}
    write_tensors(path, tensors, metadata=metadata)


def read_states(path: Path) -> SampleStates:
    """Read and check one sample.

    Raises InputError where the file is missing or not written by us (states of a serving engine do not say which layers
    they hold), StorageError where tokens, shape or values are not what they should be.
    """
    tensors, metadata = read_tensors(path, kind="hidden states")
    if "tap_indices" not in metadata:
        raise InputError(f"{path} does not say which layers it holds.", "Extract the states with this program.")
    if metadata.get("format_version") != STATES_VERSION:
        raise StorageError(f"{path} has format_version {metadata.get('format_version')}, expected {STATES_VERSION}.", _AGAIN)
    try:
        states = SampleStates(
            sample_id=metadata["sample_id"],
            token_ids=tuple(tensors["token_ids"].tolist()),
            tap_indices=tuple(json.loads(metadata["tap_indices"])),
            hidden_states=tensors["hidden_states"],
            target_digest=metadata["target_digest"],
            backend=json.loads(metadata["backend"]),
        )
        digest = metadata["token_digest"]
    except (KeyError, ValueError, TypeError) as exc:
        raise StorageError(f"{path} is damaged: {exc}.", _AGAIN) from exc
    if states.token_digest != digest:
        raise StorageError(f"{path} holds other tokens than its token_digest says.", _AGAIN)
    _check_content(states, path)
    return states


def select_taps(files: Sequence[SampleStates], wanted: Sequence[int]) -> torch.Tensor:
    """[N, T * H]: the wanted taps side by side, in the order wanted, from whichever file holds each.

    Raises InputError where a tap is in no file, or the files are of different samples, tokens, targets or dtypes.
    """
    if not files or not wanted:
        raise ValueError("select_taps needs at least one file and one tap")
    first = files[0]
    for other in files[1:]:
        for name in ("token_ids", "target_digest"):
            if getattr(other, name) != getattr(first, name):
                raise InputError(
                    f"The states of {first.sample_id} and {other.sample_id} differ in {name}; they cannot be joined.", _AGAIN
                )
        if other.hidden_states.dtype != first.hidden_states.dtype:
            raise InputError(f"Two files of sample {first.sample_id} hold states of different dtypes.", _AGAIN)
    places = {tap: (file, row) for file in reversed(files) for row, tap in enumerate(file.tap_indices)}
    missing = [tap for tap in wanted if tap not in places]
    if missing:
        raise InputError(f"Sample {first.sample_id} has states for taps {sorted(places)}, but {missing} are wanted.", _AGAIN)
    return torch.cat([places[tap][0].hidden_states[:, places[tap][1]] for tap in wanted], dim=1)


_AGAIN = "Delete the file and run the hidden_states stage again."


def _check_content(states: SampleStates, path: Path) -> None:
    """StorageError naming the fault: shape, dtype, order of taps, non-finite values, an all-zero layer."""
    hidden, taps = states.hidden_states, states.tap_indices
    fault = None
    if hidden.ndim != 3 or hidden.shape[0] != len(states.token_ids) or hidden.shape[1] != len(taps):
        fault = f"{len(states.token_ids)} tokens and {len(taps)} taps, but states of shape {tuple(hidden.shape)}"
    elif not states.token_ids or not taps or list(taps) != sorted(set(taps)):
        fault = f"no tokens, or taps that do not ascend: {list(taps)}"
    elif hidden.dtype not in DTYPES:
        fault = f"states of {hidden.dtype}; only bfloat16 and float32 hold them without overflow"
    else:
        for row, tap in enumerate(taps):
            layer = hidden[:, row]
            if not bool(torch.isfinite(layer).all()):
                fault = f"NaN or infinite values in tap {tap}"
            elif not bool(layer.any()):
                fault = f"nothing but zeros in tap {tap}"
    if fault:
        raise StorageError(f"{path} (sample {states.sample_id}) holds {fault}.", _AGAIN)
