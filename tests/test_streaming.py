"""Layer by layer gives the same bits as the whole model, for every family and dtype, and holds one layer at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_model.errors import ConfigError, InputError, StageError
from dflash_model.target.backbone import load_backbone
from dflash_model.target.hidden_states import CapturedStates, extract
from dflash_model.target.layer_checks import check_layers
from dflash_model.target.streaming import StreamedTarget, extract_streamed, open_streamed
from dflash_model.target.tables import load_tables, write_tables
from tests.tiny_targets import tiny_model, tiny_multimodal_model

SEQUENCES = ((5, 9, 14, 3, 22, 31, 8), (7,), (*range(40), 3, 5, 7), (9, 9, 9, 1))
TAPS = (0, 2, 3, 4)
FAMILIES = ("llama", "qwen3", "qwen3_5_text", "multimodal", "qwen3_moe", "qwen3_5_moe_text", "mistral")


def _saved(kind: str, directory: Path, **changes: Any) -> Path:
    model = tiny_multimodal_model() if kind == "multimodal" else tiny_model(kind, **changes)
    model.save_pretrained(directory, max_shard_size="20KB")
    return directory


def _same(left: CapturedStates, right: CapturedStates) -> bool:
    same = list(left.taps) == list(right.taps) and torch.equal(left.final, right.final)
    return same and all(torch.equal(left.taps[k], right.taps[k]) for k in left.taps)


def _on_meta(target: StreamedTarget) -> list[bool]:
    return [all(parameter.is_meta for parameter in layer.parameters()) for layer in target.backbone.layers]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_streamed_states_are_bitwise_those_of_a_full_load(tmp_path: Path, kind: str, dtype: str) -> None:
    directory = _saved(kind, tmp_path)
    backbone = load_backbone(directory, dtype=dtype)
    target = open_streamed(directory, dtype=dtype)
    streamed = list(extract_streamed(target, SEQUENCES, TAPS))
    assert len(streamed) == len(SEQUENCES)
    for found, token_ids in zip(streamed, SEQUENCES, strict=True):
        wanted = extract(backbone, token_ids, TAPS)
        assert _same(found, wanted)
        assert not torch.equal(found.taps[2], wanted.taps[3])
        assert found.final.dtype == backbone.dtype
    assert _on_meta(target) == [True] * 4


def test_sliding_windows_keep_their_masks(tmp_path: Path) -> None:
    """Rows beyond the window differ from those of a model without one, so the mask that was recorded is the layer's own."""
    narrow, wide = (_saved("mistral", tmp_path / str(w), sliding_window=w) for w in (4, 64))
    long = SEQUENCES[2]
    (found,) = extract_streamed(open_streamed(narrow, dtype="float32"), [long], TAPS)
    (other,) = extract_streamed(open_streamed(wide, dtype="float32"), [long], TAPS)
    assert _same(found, extract(load_backbone(narrow, dtype="float32"), long, TAPS))
    assert torch.equal(found.taps[0], other.taps[0])
    assert not torch.allclose(found.final[5:], other.final[5:], atol=1e-3)


def test_groups_bound_what_is_held_and_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_streamed(_saved("qwen3_5_text", tmp_path), dtype="float32")
    filled: list[int] = []
    fill = type(target.layers)._fill
    monkeypatch.setattr(type(target.layers), "_fill", lambda self, k: (filled.append(k), fill(self, k))[1])
    whole = list(extract_streamed(target, SEQUENCES, TAPS))
    assert filled == [0, 1, 2, 3]
    filled.clear()
    alone = list(extract_streamed(target, SEQUENCES, TAPS, group_bytes=1))
    assert filled == [0, 1, 2, 3] * 4
    assert all(_same(left, right) for left, right in zip(whole, alone, strict=True))


def test_only_the_layer_in_use_has_weights(tmp_path: Path) -> None:
    target = open_streamed(_saved("qwen3", tmp_path), dtype="float32")
    seen = []
    for layer in target.backbone.layers:
        layer.register_forward_hook(lambda *_: seen.append(_on_meta(target).count(False)))
    list(extract_streamed(target, SEQUENCES[:2], [4]))
    assert [count for count in seen if count] == [1] * 8


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_called_as_a_whole_it_is_the_model_and_passes_the_exact_checks(tmp_path: Path, tied: bool, dtype: str) -> None:
    directory = _saved("qwen3_5_text", tmp_path / "target", tie_word_embeddings=tied)
    write_tables(directory, tmp_path / "tables")
    target = open_streamed(directory, dtype=dtype)
    ids = torch.tensor([SEQUENCES[0]])
    with torch.no_grad():
        ours = target.backbone.model(input_ids=ids).logits
        theirs = load_backbone(directory, dtype=dtype).model(input_ids=ids).logits
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    checks = check_layers(target.backbone, SEQUENCES[2], [2, 4], tables=load_tables(tmp_path / "tables", torch.float32))
    assert [check.name for check in checks if not check.passed] == []
    assert _on_meta(target) == [True] * 4


def test_files_that_the_model_does_not_hold_as_they_are_are_refused_by_name(tmp_path: Path) -> None:
    directory = _saved("qwen3", tmp_path)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    path = directory / index["weight_map"][name]
    tensors = load_file(path)
    save_file(tensors | {f"{name}_scale_inv": torch.ones(1)}, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"hold layers\.1\.mlp\.up_proj\.weight_scale_inv, which"):
        open_streamed(directory, dtype="float32")
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(InputError, match=r"lack layers\.1\.mlp\.up_proj\.weight"):
        open_streamed(directory, dtype="float32")


def test_a_decoder_with_values_in_no_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"embed_tokens .* holds values that are in no file"):
        open_streamed(_saved("gemma2", tmp_path), dtype="float32")


def test_a_decoder_that_does_something_between_its_layers_is_refused(tmp_path: Path) -> None:
    target = open_streamed(_saved("llama", tmp_path), dtype="float32")
    target.backbone.layers[1].register_forward_hook(lambda _module, _args, output: output * 2)
    with pytest.raises(StageError, match="does not call its layers one after the other"):
        list(extract_streamed(target, SEQUENCES[:1], [1]))


def test_bad_taps_tokens_and_dtypes_are_refused_before_anything_runs(tmp_path: Path) -> None:
    directory = _saved("llama", tmp_path)
    target = open_streamed(directory, dtype="float32")
    with pytest.raises(ConfigError, match="do not fit a target of 4 layers"):
        list(extract_streamed(target, SEQUENCES, [5]))
    with pytest.raises(InputError, match="token id 40 has no row"):
        list(extract_streamed(target, [*SEQUENCES, (40,)], [1]))
    with pytest.raises(ConfigError, match="cannot be run in float16"):
        open_streamed(directory, dtype="float16")
