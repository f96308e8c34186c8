"""A target's tensors by the names that its model gives them, read from the mapped files one module at a time.

Multimodal wrappers and older savers put another prefix before the same names, and experts may be stored one by one while
the model holds them stacked. Whatever else differs (quantised weights with scales) is refused by name: a module that is
only partly filled would compute rubbish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dflash_model.errors import CheckpointError, InputError, from_os_error
from dflash_model.target.model_directory import read_shard, shard_paths
from dflash_model.target.tables import HEAD_NAMES, PREFIXES

DERIVED = ("rotary_emb.inv_freq",)
"""Endings of tensors that old savers wrote and every model computes itself."""
STACKED = {"experts.gate_up_proj": ("gate_proj", "up_proj"), "experts.down_proj": ("down_proj",)}
"""The model's stacked tensor -> the parts of each expert's file tensor, one below the other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """Which file holds which tensor of the text decoder."""

    places: Mapping[str, Path]
    """Name in the files -> the file."""

    sizes: Mapping[str, tuple[int, int]]
    """Name in the files -> (elements, bytes)."""

    prefix: str
    """What stands before the decoder's own names in the files, such as "model.language_model."."""

    @property
    def head_name(self) -> str:
        """The head's name in the files; the embedding's where they are tied."""
        return next((name for name in HEAD_NAMES if name in self.places), f"{self.prefix}embed_tokens.weight")

    def names(self) -> tuple[str, ...]:
        """The decoder's tensors, by their names in the decoder ("layers.0.mlp.up_proj.weight")."""
        inside = [name.removeprefix(self.prefix) for name in self.places if name.startswith(self.prefix)]
        other = ("visual.", "vision_tower.", "mtp.", "lm_head.") if self.prefix in ("", "model.") else ()
        return tuple(name for name in inside if not name.startswith(other) and not name.endswith(DERIVED))

    def parameter_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of decoder and head once they are all in `dtype`."""
        wanted = {f"{self.prefix}{name}" for name in self.names()} | {self.head_name}
        return sum(self.sizes[name][0] for name in wanted) * dtype.itemsize

    def layer_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the largest decoder layer in `dtype`."""
        layers: dict[str, int] = {}
        for name in self.names():
            if name.startswith("layers."):
                layer = name.split(".")[1]
                layers[layer] = layers.get(layer, 0) + self.sizes[f"{self.prefix}{name}"][0] * dtype.itemsize
        return max(layers.values(), default=0)

    def check(self, wanted: Iterable[str]) -> None:
        """Raises InputError where the decoder's tensors `wanted` and those of the files are not the same."""
        stored, needed = set(self.names()), set(wanted)
        missing, extra = needed - stored, stored - needed
        for name in [name for name in missing if self._experts(name)]:
            missing.discard(name)
            extra -= set(self._experts(name))
        if missing or extra:
            what = f"lack {sorted(missing)[0]}" if missing else f"hold {sorted(extra)[0]}, which the model has not"
            raise InputError(
                f"The target cannot be read layer by layer: its files {what} ({len(missing)} missing, {len(extra)} left over).",
                "Use extraction: full; quantised and converted checkpoints need transformers' own loading.",
            )

    def read(self, names: Iterable[str], *, dtype: torch.dtype | None, device: torch.device) -> dict[str, torch.Tensor]:
        """The decoder's tensors `names` in `dtype` (None: as stored) on `device`; mapped, not copied, where nothing changes.

        Raises CheckpointError where a file cannot be read. The mapping ends with the last tensor that is dropped.
        """
        wanted = {name: self._experts(name) or (name,) for name in names}
        raw = self._raw({f"{self.prefix}{part}" for parts in wanted.values() for part in parts})
        read = {}
        for name, parts in wanted.items():
            tensors = [raw[f"{self.prefix}{part}"].to(device=device, dtype=dtype) for part in parts]
            read[name] = tensors[0] if parts == (name,) else _stack(name, tensors)
        return read

    def read_head(self) -> torch.Tensor:
        """[V, H] the head as stored, mapped. Raises CheckpointError."""
        return self._raw({self.head_name})[self.head_name]

    def _experts(self, name: str) -> tuple[str, ...]:
        """The file tensors that a stacked tensor is made of, expert by expert; () where it is stored as it is or not at all."""
        if f"{self.prefix}{name}" in self.places:
            return ()
        for ending, parts in STACKED.items():
            if name.endswith(ending):
                stem = name.removesuffix(ending.rpartition(".")[2])
                found: list[str] = []
                while f"{self.prefix}{stem}{len(found) // len(parts)}.{parts[0]}.weight" in self.places:
                    found += [f"{stem}{len(found) // len(parts)}.{part}.weight" for part in parts]
                return tuple(found)
        return ()

    def _raw(self, names: set[str]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for path in sorted({self.places[name] for name in names}):
            try:
                with safe_open(path, framework="pt") as file:
                    found |= {name: file.get_tensor(name) for name in names if self.places[name] == path}
            except OSError as exc:
                raise from_os_error(exc, f"reading {path}") from exc
            except SafetensorError as exc:
                raise CheckpointError(f"{path} cannot be read: {exc}.", "Copy the target's files again.") from exc
        return found


def open_weights(directory: Path) -> WeightFiles:
    """Find the decoder in the files of `directory`; reads headers only. Raises InputError where there is none."""
    places: dict[str, Path] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for path in shard_paths(directory):
        for name, entry in read_shard(path).tensors.items():
            elements = 1
            for dim in entry.shape:
                elements *= dim
            places[name], sizes[name] = path, (elements, entry.end - entry.start)
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in places and f"{p}norm.weight" in places), None)
    if prefix is None:
        raise InputError(
            f"{directory} holds no embedding with a final norm beside it.", "Give the directory of a decoder-only language model."
        )
    return WeightFiles(places=places, sizes=sizes, prefix=prefix)


def _stack(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Experts' parts, in the order of `_experts`, as one tensor [experts, rows, columns]."""
    count = next(len(parts) for ending, parts in STACKED.items() if name.endswith(ending))
    return torch.stack([torch.cat(tensors[i : i + count]) for i in range(0, len(tensors), count)])
