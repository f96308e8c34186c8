"""Hidden states that a serving engine made: found by their tokens, read in the engine's form, named by our tap indices.

vLLM's extract_hidden_states writes a safetensors file a request (token_ids [N], hidden_states [N, L, H]); its layer id is
our tap index. SGLang answers /generate in JSON: the prompt's rows as the first entry of meta_info.hidden_states, layers
side by side; its id i is the output of layer i, tap i + 1. Neither says which layers it holds, so the ids that the engine
was started with are asked for, and `engine_check.py` proves them.

Shapes: N tokens, L stored layers, H hidden size.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_model.digests import json_digest
from dflash_model.errors import ConfigError, InputError, StorageError, from_os_error
from dflash_model.target.model_directory import read_shard
from dflash_model.target.tensor_file import read_tensors

VLLM, SGLANG = "vllm", "sglang"
TAP_OF_ID = {VLLM: 0, SGLANG: 1}
"""What is added to an engine's layer id to get our tap index."""
SUFFIXES = {VLLM: ".safetensors", SGLANG: ".json"}
_AGAIN = (
    "Ask the engine again with each prompt's and completion's token ids as its prompt and one new token, without prefix cache."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFiles:
    """An engine's states in one directory."""

    engine: str
    """"vllm" or "sglang"."""

    layer_ids: tuple[int, ...]
    """As the engine was given them, in that order."""

    places: dict[str, Path]
    """Digest of the tokens -> the file that holds their states."""

    @property
    def tap_indices(self) -> tuple[int, ...]:
        """Tap index of each stored layer, in file order."""
        return tuple(layer + TAP_OF_ID[self.engine] for layer in self.layer_ids)

    def read(self, token_ids: Sequence[int], *, hidden_size: int) -> torch.Tensor:
        """[N, L, H] the states of these tokens, in file order of the layers.

        Raises InputError where no file is of these tokens, StorageError where its rows or values are not what they should be.
        """
        path = self.places.get(json_digest(list(token_ids)))
        if path is None:
            raise InputError(self._no_file(token_ids), _AGAIN)
        found, states = _read_vllm(path) if self.engine == VLLM else _read_sglang(path, hidden_size)
        fault = _fault(states, len(found), len(self.layer_ids), hidden_size)
        if fault:
            raise StorageError(f"{path} holds {fault}.", _AGAIN)
        return states

    def _no_file(self, token_ids: Sequence[int]) -> str:
        said = f"No {self.engine} file is of these {len(token_ids)} tokens (prompt and completion)"
        shorter = [cut for cut in range(1, len(token_ids)) if json_digest(list(token_ids[:cut])) in self.places]
        return f"{said}; one is of their first {shorter[-1]} only." if shorter else f"{said}; {len(self.places)} are of others."


def open_engine_files(engine: str, directory: Path, layer_ids: Sequence[int], *, num_layers: int) -> EngineFiles:
    """Index the files of `directory` by their tokens.

    Raises ConfigError for an unknown engine or impossible ids, InputError for a directory without such files, StorageError
    for one that is damaged or still being written.
    """
    if engine not in TAP_OF_ID:
        raise ConfigError(f"States of the engine {engine!r} cannot be read.", f"Known: {', '.join(TAP_OF_ID)}.")
    taps = [layer + TAP_OF_ID[engine] for layer in layer_ids]
    if not taps or len(set(taps)) != len(taps) or not all(0 <= tap <= num_layers for tap in taps):
        raise ConfigError(
            f"The layer ids {list(layer_ids)} do not fit {engine} and a target of {num_layers} layers.",
            "Give them as the engine was given them, in that order: " + _IDS[engine],
        )
    places: dict[str, Path] = {}
    for path in _files(directory, SUFFIXES[engine]):
        tokens = _vllm_tokens(path) if engine == VLLM else _sglang_tokens(_json(path), path)
        places[json_digest(tokens)] = path
    if not places:
        raise InputError(f"{directory} holds no {engine} states (*{SUFFIXES[engine]}).", _AGAIN)
    return EngineFiles(engine=engine, layer_ids=tuple(layer_ids), places=places)


_IDS = {
    VLLM: "eagle_aux_hidden_state_layer_ids (a z-lab id i is i + 1 there).",
    SGLANG: "--return-aux-hidden-state-layer-ids (z-lab ids as they are).",
}


def _files(directory: Path, suffix: str) -> Iterator[Path]:
    try:
        paths = sorted(path for path in directory.iterdir() if path.name.endswith((suffix, suffix + ".zst")))
    except OSError as exc:
        raise from_os_error(exc, f"reading the engine's states in {directory}") from exc
    for path in paths:
        if path.name.endswith(".zst"):
            raise InputError(f"{path} is compressed.", "Decompress it (zstd -d), or start the engine without compression.")
        yield path


def _vllm_tokens(path: Path) -> list[int]:
    """The tokens of a vLLM file, which must not be in the making: its writer holds a lock beside it until it is whole."""
    lock = path.with_name(path.name + ".lock")
    if lock.exists():
        with lock.open() as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StorageError(f"{path} is still being written.", "Wait until the engine is done, then run again.") from None
    entries = read_shard(path).tensors
    if {"token_ids", "hidden_states"} - set(entries):
        raise InputError(f"{path} has {sorted(entries)} instead of token_ids and hidden_states.", "Remove foreign files.")
    entry = entries["token_ids"]
    width = {"I64": 8, "I32": 4}.get(entry.dtype)
    if width is None or len(entry.shape) != 1:
        raise StorageError(f"{path} has token_ids of {entry.dtype} {list(entry.shape)}.", _AGAIN)
    with path.open("rb") as file:
        file.seek(entry.start)
        raw = file.read(entry.end - entry.start)
    return [int.from_bytes(raw[i : i + width], "little", signed=True) for i in range(0, len(raw), width)]


def _read_vllm(path: Path) -> tuple[list[int], torch.Tensor]:
    tensors, _ = read_tensors(path, kind="vLLM hidden states")
    return tensors["token_ids"].tolist(), tensors["hidden_states"]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    except ValueError as exc:
        raise StorageError(f"{path} is not JSON: {exc}.", _AGAIN) from exc


def _sglang_tokens(answer: Any, path: Path) -> list[int]:
    """The prompt of a /generate answer: as the server returned it, or `input_ids` that the asker put beside it."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict) or "hidden_states" not in meta:
        raise InputError(f"{path} is no /generate answer with meta_info.hidden_states.", "Start SGLang to return hidden states.")
    for place in (answer, meta):
        for name in ("prompt_token_ids", "input_ids"):
            if isinstance(place.get(name), list):
                return [int(token) for token in place[name]]
    raise InputError(
        f"{path} does not say which tokens it is of.", "Ask with return_prompt_token_ids, or add the request's input_ids to it."
    )


def _read_sglang(path: Path, hidden_size: int) -> tuple[list[int], torch.Tensor]:
    """The prompt's rows; those of generated tokens, which follow one by one, are left."""
    answer = _json(path)
    tokens = _sglang_tokens(answer, path)
    try:
        rows = torch.tensor(answer["meta_info"]["hidden_states"][0], dtype=torch.float32)
        states = rows.reshape(rows.shape[0], -1, hidden_size)
    except (ValueError, TypeError, IndexError, RuntimeError) as exc:
        raise StorageError(f"{path} has hidden states that are no rows of {hidden_size} values a layer: {exc}.", _AGAIN) from exc
    return tokens, states


def _fault(states: torch.Tensor, tokens: int, layers: int, hidden_size: int) -> str | None:
    if tuple(states.shape) != (tokens, layers, hidden_size):
        return f"states of shape {list(states.shape)} where {[tokens, layers, hidden_size]} are expected (tokens, layers, size)"
    if states.dtype not in (torch.bfloat16, torch.float32):
        return f"states of {states.dtype}; only bfloat16 and float32 hold them without overflow"
    if not bool(torch.isfinite(states).all()):
        row, layer, _ = (~torch.isfinite(states)).nonzero()[0].tolist()
        return f"NaN or infinite values, first in row {row} of layer {layer}"
    zero = [layer for layer in range(layers) if not bool(states[:, layer].any())]
    return f"nothing but zeros in layer {zero[0]} (counted in the file)" if zero else None
