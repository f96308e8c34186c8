"""A target's directory on disk, read without torch: its config, its safetensors shards, what their headers say.

A shard that the index names but that is not there is an error here, by name, and not a KeyError hours later.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_model.errors import CheckpointError, ConfigError, InputError, from_os_error

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The bound that the safetensors format itself sets; a larger length field means a file of another kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """Where one tensor lies in its shard."""

    dtype: str
    """The header's word: "BF16", "F32", ..."""

    shape: tuple[int, ...]
    """Dimensions, outermost first."""

    start: int
    """Offset of its first byte from the start of the file."""

    end: int
    """Offset one past its last byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One safetensors file: its header, not its tensors."""

    path: Path
    """The file."""

    size_bytes: int
    """Size of the file, equal to what the header describes."""

    header: bytes
    """The JSON header as it stands in the file."""

    tensors: dict[str, TensorEntry]
    """Tensor name -> where it lies."""


def read_json_file(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises InputError where the file is missing, CheckpointError where it holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    except ValueError as exc:
        raise CheckpointError(f"{path} is not JSON: {exc}.", "Copy the target's files again.") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object.", "Copy the target's files again.")
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """The target's config.json. Raises InputError where `directory` is not a model directory."""
    if not directory.is_dir():
        raise InputError(
            f"{directory} is not a directory.", "Give the directory that holds the target's config.json and weights."
        )
    if not (directory / CONFIG_NAME).is_file():
        raise InputError(
            f"{directory} has no {CONFIG_NAME}.", "Give the directory that holds the target's config.json and weights."
        )
    return read_json_file(directory / CONFIG_NAME)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the language model: `text_config` of a multimodal wrapper, else all of it."""
    nested = config.get("text_config")
    if nested is None:
        return config
    if not isinstance(nested, dict):
        raise ConfigError("The target's config.json has a text_config that is not an object.", "Copy the target's files again.")
    return nested


def shard_paths(directory: Path) -> tuple[Path, ...]:
    """The safetensors files that hold the model, sorted by name.

    With an index: the files that it names, all of which must be there. Without: model.safetensors.
    Raises InputError where weights are missing (a directory with a config alone, or a shard that is not there).
    """
    if (directory / INDEX_NAME).is_file():
        return _indexed_shards(directory)
    single = directory / SINGLE_NAME
    if single.is_file():
        return (single,)
    raise InputError(
        f"{directory} holds no weights: neither {SINGLE_NAME} nor {INDEX_NAME} is there.",
        "Give a directory with the target's safetensors files; a config alone, or .bin weights, cannot be used.",
    )


def _indexed_shards(directory: Path) -> tuple[Path, ...]:
    weight_map = read_json_file(directory / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX_NAME} has no weight_map.", "Copy the target's files again.")
    names = sorted({str(name) for name in weight_map.values()})
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise CheckpointError(
            f"{INDEX_NAME} names a file outside of {directory}: {foreign[0]}.", "Copy the target's files again."
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise InputError(
            f"{directory} lacks {len(missing)} of the {len(names)} shards that {INDEX_NAME} names: {', '.join(missing)}.",
            "Finish the download or copy of the target, then run again.",
        )
    return tuple(directory / name for name in names)


def read_shard(path: Path) -> Shard:
    """Header and tensor places of one safetensors file. Raises CheckpointError where it is truncated or of another kind."""
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size_bytes - 8):
                raise CheckpointError(f"{path} is not a safetensors file: header length {length}.", "Copy the file again.")
            header = file.read(length)
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    try:
        tensors = _parse_header(header, data_start=8 + length)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise CheckpointError(f"{path} has an unreadable safetensors header: {exc}.", "Copy the file again.") from exc
    end = max((entry.end for entry in tensors.values()), default=8 + length)
    if end != size_bytes:
        raise CheckpointError(
            f"{path} is {size_bytes} bytes long, but its header describes {end}: it is truncated or still growing.",
            "Copy the file again.",
        )
    return Shard(path=path, size_bytes=size_bytes, header=header, tensors=tensors)


def _parse_header(header: bytes, *, data_start: int) -> dict[str, TensorEntry]:
    tensors = {}
    for name, entry in json.loads(header).items():
        if name == "__metadata__":
            continue
        start, end = (int(offset) for offset in entry["data_offsets"])
        if not 0 <= start <= end:
            raise ValueError(f"{name} lies at {start}..{end}")
        shape = tuple(int(dim) for dim in entry["shape"])
        tensors[name] = TensorEntry(dtype=str(entry["dtype"]), shape=shape, start=data_start + start, end=data_start + end)
    return tensors
