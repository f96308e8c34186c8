"""Stage identify-target: which target lies in a directory (or under a hub id and revision), by fingerprint and shape.

Parameters: {path, host, listing} or {hub_id, revision}. Facts: fingerprint, depth, width, embedding rows, tokenizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_model.errors import InputError
from dflash_model.stages.protocol import Context
from dflash_model.stages.target_directory import fetch_from_hub
from dflash_model.storage import write_json
from dflash_model.target.fingerprint import fingerprint
from dflash_model.target.model_directory import read_config, read_shard, shard_paths, text_config
from dflash_model.target.tables import PREFIXES


def run(context: Context) -> None:
    """Fingerprint the target and write its facts."""
    chosen = context.parameters
    directory = Path(chosen["path"]) if "path" in chosen else fetch_from_hub(chosen["hub_id"], chosen["revision"])
    identity = fingerprint(directory)
    with context.writing() as writer:
        write_json(writer.path / "fingerprint.json", identity.to_json())
        writer.facts |= {
            "fingerprint": identity.digest,
            "weights_digest": identity.weights_digest,
            "tokenizer_sha256": identity.text.get("tokenizer.json"),
            **_shape(directory),
        }
        writer.made_by["path"] = str(directory)


def _shape(directory: Path) -> dict[str, Any]:
    config = text_config(read_config(directory))
    for key in ("num_hidden_layers", "hidden_size"):
        if not isinstance(config.get(key), int):
            raise InputError(f"{directory}/config.json has no {key}.", "Give a language model's directory.")
    return {
        "model_type": str(config.get("model_type")),
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "vocab_size": _embedding_rows(directory),
    }


def _embedding_rows(directory: Path) -> int:
    """Rows of the embedding as stored: what token ids may index, whatever the tokenizer's length."""
    for path in shard_paths(directory):
        tensors = read_shard(path).tensors
        for prefix in PREFIXES:
            entry = tensors.get(f"{prefix}embed_tokens.weight")
            if entry is not None:
                return entry.shape[0]
    raise InputError(f"{directory} holds no embed_tokens.weight.", "Give the target itself, not a drafter or an adapter.")
