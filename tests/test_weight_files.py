"""Tensors by the model's names, whatever stands before them in the files; experts stacked as the model holds them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.errors import InputError
from dflash_model.target.weight_files import open_weights

CPU = torch.device("cpu")


def _write(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Two shards with an index: every other tensor in each."""
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, directory / shard)
    places = {name: shard for shard, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return directory


def _tensors(prefix: str) -> dict[str, torch.Tensor]:
    decoder = {"embed_tokens.weight": torch.ones(4, 2), "norm.weight": torch.ones(2), "layers.0.mlp.up.weight": torch.eye(2)}
    return {f"{prefix}{name}": tensor for name, tensor in decoder.items()} | {"lm_head.weight": torch.full((4, 2), 3.0)}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", ""])
def test_every_known_prefix_gives_the_decoders_own_names(tmp_path: Path, prefix: str) -> None:
    vision = "model.visual.x" if prefix.startswith("model.") else "visual.x"
    extra = {vision: torch.ones(1), "mtp.y": torch.ones(1), f"{prefix}rotary_emb.inv_freq": torch.ones(1)}
    files = open_weights(_write(tmp_path, _tensors(prefix) | extra))
    assert files.prefix == prefix
    assert set(files.names()) == {"embed_tokens.weight", "norm.weight", "layers.0.mlp.up.weight"}
    read = files.read(["layers.0.mlp.up.weight"], dtype=torch.bfloat16, device=CPU)["layers.0.mlp.up.weight"]
    assert read.dtype == torch.bfloat16
    assert torch.equal(read.float(), torch.eye(2))
    assert torch.equal(files.read_head(), torch.full((4, 2), 3.0))


def test_a_tied_heads_rows_are_the_embeddings(tmp_path: Path) -> None:
    tensors = _tensors("model.")
    del tensors["lm_head.weight"]
    files = open_weights(_write(tmp_path, tensors))
    assert torch.equal(files.read_head(), torch.ones(4, 2))
    assert files.parameter_bytes(torch.float32) == 4 * (8 + 2 + 4)


def test_experts_stored_one_by_one_are_stacked_gate_above_up(tmp_path: Path) -> None:
    experts = {}
    for expert in range(3):
        for number, part in enumerate(("gate_proj", "up_proj", "down_proj")):
            experts[f"model.layers.0.mlp.experts.{expert}.{part}.weight"] = torch.full((2, 2), 10.0 * expert + number)
    files = open_weights(_write(tmp_path, _tensors("model.") | experts))
    stacked = ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]
    files.check(["embed_tokens.weight", "norm.weight", "layers.0.mlp.up.weight", *stacked])
    read = files.read(stacked, dtype=None, device=CPU)
    assert read[stacked[0]][:, :, 0].tolist() == [[0, 0, 1, 1], [10, 10, 11, 11], [20, 20, 21, 21]]
    assert read[stacked[1]][:, 0, 0].tolist() == [2, 12, 22]
    with pytest.raises(InputError, match="which the model has not"):
        files.check(["embed_tokens.weight", "norm.weight", "layers.0.mlp.up.weight", stacked[0]])


def test_a_directory_without_a_decoder_is_refused(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="no embedding with a final norm"):
        open_weights(tmp_path)
