"""Which target this is: one digest over its files, and one a file, so that a difference can be named.

Shards are sampled, not read whole (54 GB would take minutes a night): size, header, evenly spaced blocks, and the
middle of every tensor, so that a change confined to one tensor shows as well. It tells targets apart; it does not
prove that every byte of a copy is right.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_model.digests import file_digest, json_digest
from dflash_model.errors import CheckpointError, from_os_error
from dflash_model.target.model_directory import CONFIG_NAME, INDEX_NAME, Shard, read_config, read_shard, shard_paths

BLOCKS = 16
BLOCK_BYTES = 64 * 1024
TENSOR_BYTES = 512
WEIGHT_FILES = (CONFIG_NAME, INDEX_NAME)
TEXT_FILES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFingerprint:
    """A target's identity, file by file."""

    weights: dict[str, str]
    """config.json, the shard index and every shard: name -> sha256 (of a sample, for shards). Decides hidden states."""

    text: dict[str, str]
    """Tokenizer, chat template and generation config, those that are there: name -> sha256. Decides prompts and stops."""

    @property
    def weights_digest(self) -> str:
        """sha256 over `weights`: what hidden states and tables depend on."""
        return json_digest(self.weights)

    @property
    def digest(self) -> str:
        """sha256 over all parts: what references depend on."""
        return json_digest({"weights": self.weights, "text": self.text})

    def differences(self, other: TargetFingerprint) -> tuple[str, ...]:
        """One phrase a file that differs, seen from self ("config.json differs", "... is missing there"); () if equal."""
        ours, theirs = self.weights | self.text, other.weights | other.text
        phrases = []
        for name in sorted(ours.keys() | theirs.keys()):
            if name not in theirs:
                phrases.append(f"{name} is missing there")
            elif name not in ours:
                phrases.append(f"{name} is missing here")
            elif ours[name] != theirs[name]:
                phrases.append(f"{name} differs")
        return tuple(phrases)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads back."""
        return {"digest": self.digest, "weights_digest": self.weights_digest, "weights": self.weights, "text": self.text}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TargetFingerprint:
        """Read `to_json`'s value; ValueError where its digest does not match its parts."""
        result = cls(weights=dict(data["weights"]), text=dict(data["text"]))
        if result.digest != data.get("digest"):
            raise ValueError("target fingerprint does not match its own digest")
        return result


def fingerprint(directory: Path) -> TargetFingerprint:
    """The identity of the target in `directory`.

    Raises InputError for a directory without config or weights and for a missing shard, CheckpointError for a damaged shard.
    """
    read_config(directory)
    shards = [read_shard(path) for path in shard_paths(directory)]
    try:
        weights = {name: file_digest(directory / name) for name in WEIGHT_FILES if (directory / name).is_file()}
        text = {name: file_digest(directory / name) for name in TEXT_FILES if (directory / name).is_file()}
        weights |= {shard.path.name: _shard_digest(shard) for shard in shards}
    except OSError as exc:
        raise from_os_error(exc, f"reading the target in {directory}") from exc
    return TargetFingerprint(weights=weights, text=text)


def _shard_digest(shard: Shard) -> str:
    digest = hashlib.sha256(f"{shard.path.name} {shard.size_bytes}\n".encode())
    digest.update(shard.header)
    with shard.path.open("rb") as file:
        for offset, length in _sampled_ranges(shard):
            file.seek(offset)
            block = file.read(length)
            if len(block) != length:
                raise CheckpointError(
                    f"{shard.path} shrank while it was read.", "Wait until the copy is complete, then run again."
                )
            digest.update(block)
    return digest.hexdigest()


def _sampled_ranges(shard: Shard) -> list[tuple[int, int]]:
    """(offset, length) of the blocks to hash, ascending: first, last and evenly spaced ones, and each tensor's middle."""
    data_start = 8 + len(shard.header)
    last = max(data_start, shard.size_bytes - BLOCK_BYTES)
    ranges = {
        (offset, min(BLOCK_BYTES, shard.size_bytes - offset))
        for offset in (data_start + (last - data_start) * i // (BLOCKS - 1) for i in range(BLOCKS))
    }
    for entry in shard.tensors.values():
        length = min(TENSOR_BYTES, entry.end - entry.start)
        ranges.add((entry.start + (entry.end - entry.start - length) // 2, length))
    return sorted(ranges)
