"""Bad configs and files of every form: each is one sentence with key, value and fix, and its healthy neighbour passes silently."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_model.checkpoint.directory import LocalDirectory
from dflash_model.checkpoint.extract import plan_extraction
from dflash_model.checkpoint.open_table import open_directory_table
from dflash_model.drafter.building import Reading
from dflash_model.drafter.geometry import Geometry
from dflash_model.drafter.reading import read_directory, tensors_of_plan
from dflash_model.errors import EvalError
from tests.drafter_forms import (
    DFLASH2,
    DFLASH2_KEYS,
    OWN_TABLES,
    REDUCED,
    changed,
    deepspec_config,
    geometry_with,
    sliding,
    speculators_config,
)
from tests.tiny_drafters import GEOMETRY, zlab_config

KEPT = [0, 1, 2, 3, 7, 8, *range(20, 32), 40, 49]
OFFSETS = torch.tensor([target - row for row, target in enumerate(KEPT)])
MARKS = torch.tensor([number in KEPT for number in range(50)])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

TRAINED_WITH = "Write the value the drafter was trained with."
SAME_CHECKPOINT = "Config and weights belong to different drafters; take both from the same checkpoint."
NOT_THIS = "Check that this is the file of a DFlash drafter, and that it is whole."
MAP_FIX = "Take config, head and map from the same checkpoint."
IDS_FIX = "z-lab's numbers mean the output of 0-based layer i; speculators' and vLLM's are one higher."
OTHER_ROTATION = "Write what the drafter was trained with; another rotation is another drafter."
FAMILY_FIX = "Only DFlash and DFlash2 drafters can be evaluated; use the engine or trainer of that family for this one."


def never_guessed(key: str) -> str:
    return f"Write the {key} that the drafter was trained with; it is never guessed."


def keep_one(setting: str) -> str:
    return f"Keep one of them, or write the same {setting} in both."


@dataclass(frozen=True, kw_only=True)
class Form:
    """A healthy checkpoint of one form."""

    config: dict[str, Any]
    geometry: Geometry = GEOMETRY
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        return self.config, {name: torch.ones(shape) for name, shape in self.geometry.tensor_shapes().items()} | self.tensors


ZLAB = Form(config=zlab_config())
DFLASH2_FORM = Form(config=zlab_config(architectures=["DFlash2DraftModel"], dflash_config=DFLASH2_KEYS), geometry=DFLASH2)
SPECULATORS = Form(config=speculators_config())
SLIDING = Form(config=speculators_config(transformer_layer_config=sliding()))
REDUCED_FORM = Form(config=speculators_config(draft_vocab_size=20), geometry=REDUCED, tensors={"d2t": OFFSETS, "t2d": MARKS})
DEEPSPEC = Form(config=deepspec_config(), geometry=OWN_TABLES)
MASKED = Form(config=zlab_config(), geometry=geometry_with(mask_embedding=True))

Change = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake, its sentence and fix, and what would have been right in its place."""

    form: Form
    problem: str
    fix: str
    config: Change = field(default_factory=dict)
    tensors: Change = field(default_factory=dict)
    right_config: Change = field(default_factory=dict)
    right_tensors: Change = field(default_factory=dict)


def nested(**keys: Any) -> Change:
    return {"dflash_config": keys}


def layers(**keys: Any) -> Change:
    return {"transformer_layer_config": keys}


CASES: dict[str, Case] = {
    # The mask id.
    "mask id missing": Case(
        form=ZLAB, config=nested(mask_token_id=...), right_config=nested(mask_token_id=0),
        problem="config.json gives no mask_token_id (looked for dflash_config.mask_token_id).", fix=never_guessed("mask_token_id"),
    ),
    "mask id null": Case(
        form=SPECULATORS, config={"mask_token_id": None}, right_config={"mask_token_id": 7},
        problem="config.json gives no mask_token_id (looked for mask_token_id).", fix=never_guessed("mask_token_id"),
    ),
    "mask id one past the vocabulary": Case(
        form=ZLAB, config=nested(mask_token_id=50), right_config=nested(mask_token_id=49),
        problem="config.json dflash_config.mask_token_id is 50, but config.json vocab_size is 50: that id has no embedding row.",
        fix="Give the mask id that the drafter was trained with.",
    ),
    "mask id past the vocabulary in speculators": Case(
        form=SPECULATORS, config={"mask_token_id": 64}, right_config={"mask_token_id": 49},
        problem="config.json mask_token_id is 64, but config.json transformer_layer_config.vocab_size is 50: that id has no embedding row.",
        fix="Give the mask id that the drafter was trained with.",
    ),
    "mask id negative": Case(
        form=DEEPSPEC, config={"mask_token_id": -1}, right_config={"mask_token_id": 4},
        problem="config.json mask_token_id is -1, expected a whole number of at least 0.", fix=TRAINED_WITH,
    ),
    "mask id in quotes": Case(
        form=ZLAB, config=nested(mask_token_id="3"), right_config=nested(mask_token_id=3),
        problem="config.json dflash_config.mask_token_id is '3', expected a whole number of at least 0.", fix=TRAINED_WITH,
    ),
    "mask id in two places": Case(
        form=ZLAB, config={"mask_token_id": 4}, right_config={"mask_token_id": 3},
        problem="config.json dflash_config.mask_token_id is 3, but config.json mask_token_id is 4.", fix=keep_one("mask_token_id"),
    ),
    # The taps.
    "ids missing": Case(
        form=ZLAB, config=nested(target_layer_ids=...), right_config=nested(target_layer_ids=[0, 1, 2]),
        problem="config.json gives no target_layer_ids (looked for dflash_config.target_layer_ids).", fix=never_guessed("target_layer_ids"),
    ),
    "ids fewer than fc reads": Case(
        form=ZLAB, config=nested(target_layer_ids=[1, 3]), right_config=nested(target_layer_ids=[0, 1, 3]),
        problem="config.json dflash_config.target_layer_ids is [1, 3], 2 layers, but fc.weight reads 3 times the hidden size.",
        fix="Give the target layers that the drafter was trained on, in order.",
    ),
    "ids twice": Case(
        form=ZLAB, config=nested(target_layer_ids=[1, 3, 3]), right_config=nested(target_layer_ids=[1, 3, 5]),
        problem="config.json dflash_config.target_layer_ids is [1, 3, 3], expected unique layer numbers in increasing order.",
        fix=TRAINED_WITH,
    ),
    "ids decreasing": Case(
        form=SPECULATORS, config={"aux_hidden_state_layer_ids": [5, 4, 2]}, right_config={"aux_hidden_state_layer_ids": [0, 4, 6]},
        problem="config.json aux_hidden_state_layer_ids is [5, 4, 2], expected unique layer numbers in increasing order.",
        fix=TRAINED_WITH,
    ),
    "ids past the target": Case(
        form=ZLAB, config=nested(target_layer_ids=[1, 3, 6]), right_config=nested(target_layer_ids=[1, 3, 5]),
        problem="config.json dflash_config.target_layer_ids is [1, 3, 6], but config.json num_target_layers is 6: layers count from 0 to 5.",
        fix=IDS_FIX,
    ),
    "minus one outside DeepSpec": Case(
        form=ZLAB, config=nested(target_layer_ids=[-1, 3, 4]), right_config=nested(target_layer_ids=[0, 3, 4]),
        problem="config.json dflash_config.target_layer_ids[0] is -1, expected a whole number of at least 0.", fix=TRAINED_WITH,
    ),
    "minus two in DeepSpec": Case(
        form=DEEPSPEC, config={"target_layer_ids": [-2, 3, 4]}, right_config={"target_layer_ids": [-1, 3, 4]},
        problem="config.json target_layer_ids[0] is -2, expected a whole number of at least -1.", fix=TRAINED_WITH,
    ),
    # Block size and slot layout.
    "block size missing": Case(
        form=ZLAB, config={"block_size": ...}, right_config={"block_size": ...} | nested(block_size=5),
        problem="config.json gives no block_size (looked for dflash_config.block_size or block_size).", fix=never_guessed("block_size"),
    ),
    "block larger than the one trained": Case(
        form=ZLAB, config={"block_size": 16} | nested(block_size=5), right_config={"block_size": 5} | nested(block_size=5),
        problem="config.json dflash_config.block_size is 5, but config.json block_size is 16.", fix=keep_one("block_size"),
    ),
    "block of one row": Case(
        form=SPECULATORS, config={"block_size": 1, "speculators_config": ...}, right_config={"block_size": 2, "speculators_config": ...},
        problem="config.json block_size is 1, expected a whole number of at least 2 (the anchor's row included).", fix=TRAINED_WITH,
    ),
    "two slot layouts": Case(
        form=ZLAB, config={"sample_from_anchor": True} | nested(query_zero_predicts_next=False),
        right_config={"sample_from_anchor": True} | nested(query_zero_predicts_next=True),
        problem="config.json sample_from_anchor is True, but config.json dflash_config.query_zero_predicts_next is False.",
        fix=keep_one("slot layout"),
    ),
    "DeepSpec that drops slot 0": Case(
        form=DEEPSPEC, config={"sample_from_anchor": False}, right_config={"sample_from_anchor": True},
        problem="config.json sample_from_anchor says that slot 0 is dropped, but Qwen3DSparkModel is trained to predict from it.",
        fix="Remove the key.",
    ),
    # The vocabulary.
    "absolute ids in the map": Case(
        form=REDUCED_FORM, tensors={"d2t": torch.tensor(KEPT)}, right_tensors={"d2t": OFFSETS},
        problem="d2t holds absolute ids (entry 0 is 0, entry 19 is 49), expected offsets.",
        fix="Save offsets: the target's id minus the row's own number.",
    ),
    "absolute ids without marks": Case(
        form=REDUCED_FORM, tensors={"d2t": torch.tensor(KEPT), "t2d": ...}, right_tensors={"t2d": ...},
        problem="d2t holds absolute ids (entry 0 is 0, entry 19 is 49), expected offsets.",
        fix="Save offsets: the target's id minus the row's own number.",
    ),
    "map and marks disagree": Case(
        form=REDUCED_FORM, tensors={"t2d": torch.tensor([number < 20 for number in range(50)])}, right_tensors={"t2d": MARKS},
        problem="d2t and t2d disagree: only one of them names the target's id 4.", fix=MAP_FIX,
    ),
    "map past the vocabulary": Case(
        form=REDUCED_FORM, tensors={"d2t": torch.full((20,), 31), "t2d": ...}, right_tensors={"d2t": torch.full((20,), 30), "t2d": ...},
        problem="d2t[19] is 31, so row 19 would be the target's id 50, outside its vocabulary of 50.", fix=MAP_FIX,
    ),
    "map that names an id twice": Case(
        form=REDUCED_FORM, tensors={"d2t": torch.tensor([0, 0, -1, *[0] * 17]), "t2d": ...}, right_tensors={"d2t": torch.zeros(20).long(), "t2d": ...},
        problem="d2t names the target's id 1 in two rows.", fix=MAP_FIX,
    ),
    "map of another length": Case(
        form=REDUCED_FORM, tensors={"d2t": torch.zeros(19).long(), "t2d": ...}, right_tensors={"t2d": ...},
        problem="d2t has 19 entries, but lm_head.weight has 20 rows.",
        fix="Take both from the same checkpoint: entry i of the map speaks of row i of the head.",
    ),
    "reduced head without a map": Case(
        form=REDUCED_FORM, tensors={"d2t": ..., "t2d": ...}, right_tensors={},
        problem="lm_head.weight has 20 rows, but config.json transformer_layer_config.vocab_size is 50, and the file holds no d2t.",
        fix="A reduced vocabulary needs its map: save d2t (offsets, row i is the target's id i + d2t[i]) with the weights.",
    ),
    "reduced vocabulary without a head": Case(
        form=SPECULATORS, config={"draft_vocab_size": 20}, right_config={"draft_vocab_size": 50},
        problem="config.json draft_vocab_size is 20, but config.json transformer_layer_config.vocab_size is 50, "
        "and the file holds no lm_head.weight with a d2t.",
        fix="Save the reduced head and its map with the weights.",
    ),
    "another reduced vocabulary than the head's": Case(
        form=REDUCED_FORM, config={"draft_vocab_size": 24}, right_config={"draft_vocab_size": 20},
        problem="config.json draft_vocab_size is 24, but the shape of d2t shows draft_vocab_size 20.", fix=MAP_FIX,
    ),
    "embedding of another vocabulary": Case(
        form=DEEPSPEC, config={"vocab_size": 48}, right_config={"vocab_size": 50},
        problem="config.json vocab_size is 48, but the shape of embed_tokens.weight shows vocab_size 50.", fix=MAP_FIX,
    ),
    # The rotation.
    "base missing": Case(
        form=ZLAB, config={"rope_theta": ...}, right_config={"rope_theta": ..., "rope_parameters": {"rope_theta": 100.0}},
        problem="config.json gives no rope_theta (looked for rope_parameters.rope_theta, rope_scaling.rope_theta or rope_theta).",
        fix=never_guessed("rope_theta"),
    ),
    "bases that disagree": Case(
        form=ZLAB, config={"rope_parameters": {"rope_theta": 1e7}}, right_config={"rope_parameters": {"rope_theta": 100}},
        problem="config.json rope_parameters.rope_theta is 10000000.0, but config.json rope_theta is 100.0.", fix=keep_one("rope_theta"),
    ),
    "type unknown": Case(
        form=SPECULATORS, config=layers(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
        right_config=layers(rope_parameters={"rope_type": "linear", "factor": 2.0}),
        problem="config.json transformer_layer_config.rope_parameters.rope_type is 'dynamic'; "
        "only default, linear, llama3, yarn can be applied exactly.",
        fix="This drafter cannot be evaluated yet; do not rewrite the key, the drafter would no longer be the trained one.",
    ),
    "type without its numbers": Case(
        form=ZLAB, config={"rope_scaling": {"type": "yarn", "factor": 4.0}}, right_config={"rope_scaling": YARN},
        problem="config.json rope_scaling.type is 'yarn', but config.json rope_scaling gives no original_max_position_embeddings.",
        fix=OTHER_ROTATION,
    ),
    "scaling without a type": Case(
        form=ZLAB, config={"rope_scaling": {"factor": 4.0}}, right_config={"rope_scaling": {"factor": 4.0, "rope_type": "linear"}},
        problem="config.json rope_scaling holds factor but no rope_type.", fix=OTHER_ROTATION,
    ),
    "sections that do not fill the head": Case(
        form=ZLAB, config={"rope_scaling": {"mrope_section": [1, 1, 1], "type": "mrope"}},
        right_config={"rope_scaling": {"mrope_section": [2, 1, 1], "type": "mrope"}},
        problem="config.json rope_scaling.mrope_section is [1, 1, 1], which makes 6 dimensions, but 8 are rotated.",
        fix="Half of the rotated dimensions must be the sum of the sections.",
    ),
    "rotated dimensions wider than a head": Case(
        form=ZLAB, config={"rotary_dim": 10}, right_config={"rotary_dim": 4},
        problem="config.json rotary_dim is 10, expected an even number of at most 8, the width of a head.", fix=TRAINED_WITH,
    ),
    # Attention masks.
    "window switched off": Case(
        form=ZLAB, config=sliding() | {"use_sliding_window": False}, right_config=sliding(),
        problem="layer_types names sliding_attention, but config.json use_sliding_window is false: PyPI dflash then drops the window, "
        "engines keep it.",
        fix='Write "use_sliding_window": true and the window as sliding_window if the drafter was trained with one; otherwise call the '
        'layers full_attention (and write "is_causal": true if the block was causal).',
    ),
    "window switched off in speculators": Case(
        form=SLIDING, config=layers(use_sliding_window=False), right_config=layers(use_sliding_window=True),
        problem="config.json transformer_layer_config.layer_types names sliding_attention and config.json "
        "transformer_layer_config.sliding_window is 7, but config.json transformer_layer_config.use_sliding_window is false.",
        fix="Write true if the drafter was trained with the window, else call the layers full_attention.",
    ),
    "types for other layers": Case(
        form=ZLAB, config={"layer_types": ["full_attention"]}, right_config={"layer_types": ["full_attention"] * 2},
        problem="config.json layer_types lists 1 layers, but the weights hold 2.", fix="List one type per draft layer.",
    ),
    "two kinds of causality": Case(
        form=ZLAB, config={"is_causal": True} | nested(causal=False), right_config={"is_causal": True} | nested(causal=True),
        problem="config.json is_causal is True, but config.json dflash_config.causal is False.", fix=keep_one("causality"),
    ),
    # Sizes and families.
    "another hidden size": Case(
        form=ZLAB, config={"hidden_size": 32}, right_config={"hidden_size": 24},
        problem="config.json hidden_size is 32, but norm.weight in the weights shows 24.", fix=SAME_CHECKPOINT,
    ),
    "more layers than the weights hold": Case(
        form=SPECULATORS, config=layers(num_hidden_layers=3), right_config=layers(num_hidden_layers=2),
        problem="config.json transformer_layer_config.num_hidden_layers is 3, but layers.* in the weights shows 2.", fix=SAME_CHECKPOINT,
    ),
    "epsilon missing": Case(
        form=SPECULATORS, config=layers(rms_norm_eps=...), right_config=layers(rms_norm_eps=1e-6),
        problem="config.json gives no rms_norm_eps (looked for transformer_layer_config.rms_norm_eps).", fix=never_guessed("rms_norm_eps"),
    ),
    "DFlash2 config over plain weights": Case(
        form=ZLAB, config=nested(**DFLASH2_KEYS), right_config={},
        problem="config.json dflash_config.conv_kernel_size is 2, but the weights hold no convolutions and candidate selector.",
        fix="This is a DFlash2 config; take config and weights from the same checkpoint.",
    ),
    "DFlash2 class over plain weights": Case(
        form=ZLAB, config={"architectures": ["DFlash2DraftModel"]}, right_config={"architectures": ["DFlashDraftModel"]},
        problem="config.json architectures names DFlash2DraftModel, but the weights hold no convolutions and candidate selector.",
        fix="Take config and weights from the same checkpoint.",
    ),
    "DFlash2 without its candidates": Case(
        form=DFLASH2_FORM, config=nested(selector_top_k=...), right_config=nested(conv_kernel_size=...),
        problem="The drafter is DFlash2, but nothing states selector_top_k.",
        fix="Write the selector_top_k that the drafter was trained with below dflash_config; weights do not show it.",
    ),
    "DFlash2 of another group size": Case(
        form=DFLASH2_FORM, config=nested(conv_group_size=4), right_config=nested(conv_group_size=8),
        problem="config.json dflash_config.conv_group_size is 4, but the weights show 8.", fix=SAME_CHECKPOINT,
    ),
    "DSpark": Case(
        form=DEEPSPEC, config={"markov_rank": 256}, right_config={"markov_rank": 0},
        problem="config.json markov_rank is 256: this is a DSpark drafter, whose Markov head is not supported.",
        fix="Only DeepSpec drafters with markov_rank 0 can be evaluated; use DeepSpec's own evaluation for this one.",
    ),
    "DSpark in speculators": Case(
        form=SPECULATORS, config={"speculators_model_type": "dspark"}, right_config={"speculators_model_type": "dflash"},
        problem="config.json speculators_model_type is 'dspark', which is DSpark: its Markov and confidence heads are not supported.",
        fix="Only dflash and dflash2 can be evaluated; use speculators or vLLM for this one.",
    ),
    "another activation": Case(
        form=ZLAB, config={"hidden_act": "gelu"}, right_config={"hidden_act": "silu"},
        problem="config.json hidden_act is 'gelu'; only 'silu' is supported.", fix=FAMILY_FIX,
    ),
    # Tensors.
    "tensor missing": Case(
        form=ZLAB, tensors={"layers.1.mlp.up_proj.weight": ...}, right_tensors={},
        problem="The file lacks 1 of the drafter's tensors: layers.1.mlp.up_proj.weight.", fix=NOT_THIS,
    ),
    "tensor unused": Case(
        form=ZLAB, tensors={"layers.0.mlp.gate_proj.bias": torch.ones(40)}, right_tensors={},
        problem="A DFlash drafter has no tensor layers.0.mlp.gate_proj.bias.", fix=FAMILY_FIX,
    ),
    "tensor of a layer that is not there": Case(
        form=ZLAB, tensors={"layers.3.mlp.up_proj.weight": torch.ones(40, 24)}, right_tensors={},
        problem="The file holds layers [0, 1, 3], with gaps between them.", fix=NOT_THIS,
    ),
    "Markov head": Case(
        form=ZLAB, tensors={"markov_head.markov_w1.weight": torch.ones(50, 4)}, right_tensors={},
        problem="This is a DSpark drafter (Markov or confidence head): the file holds markov_head.markov_w1.weight.", fix=FAMILY_FIX,
    ),
    "tensor of another shape": Case(
        form=ZLAB, tensors={"layers.1.self_attn.k_proj.weight": torch.ones(24, 24)},
        right_tensors={"layers.1.self_attn.k_proj.weight": torch.ones(16, 24)},
        problem="layers.1.self_attn.k_proj.weight has shape [24, 24], expected [16, 24].", fix=NOT_THIS,
    ),
    "fc of no whole number of taps": Case(
        form=ZLAB, tensors={"fc.weight": torch.ones(24, 70)}, right_tensors={"fc.weight": torch.ones(24, 72)},
        problem="fc.weight has shape [24, 70]: 70 is not a multiple of 24, the hidden size in norm.weight.", fix=NOT_THIS,
    ),
    "mask embedding of two rows": Case(
        form=MASKED, tensors={"mask_embedding": torch.ones(2, 24)}, right_tensors={"mask_embedding": torch.ones(24)},
        problem="mask_embedding has shape [2, 24], expected [24].", fix=NOT_THIS,
    ),
    "DeepSpec without its head": Case(
        form=DEEPSPEC, tensors={"lm_head.weight": ...}, right_tensors={},
        problem="The file has no tensor lm_head.weight, which every DeepSpec drafter has.", fix="Check that the checkpoint is whole.",
    ),
}  # fmt: skip


def read(directory: Path, form: Form, config: Change, tensors: Change) -> Reading:
    whole_config, whole_tensors = form.files()
    kept = {name: tensor for name, tensor in (whole_tensors | tensors).items() if tensor is not ...}
    save_file(kept, directory / "model.safetensors")
    return read_files(directory, changed(whole_config, config))


def read_files(path: Path, config: dict[str, Any]) -> Reading:
    with LocalDirectory(path) as directory:
        plan = plan_extraction(open_directory_table(directory), keep_vocab=True)
        return read_directory(tensors_of_plan(plan), config)


def test_the_table_is_as_long_as_promised() -> None:
    assert len(CASES) + len(BROKEN_FILES) >= 60


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_mistake_is_one_sentence_and_its_neighbour_passes_silently(case: Case, tmp_path: Path) -> None:
    with pytest.raises(EvalError) as caught:
        read(tmp_path, case.form, case.config, case.tensors)
    assert (caught.value.problem, caught.value.fix) == (case.problem, case.fix)
    assert read(tmp_path, case.form, case.right_config, case.right_tensors).warnings == ()


def shards(path: Path) -> None:
    """The z-lab drafter in two shards."""
    _, tensors = ZLAB.files()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, path / file)
    where = {name: file for file, held in halves.items() for name in held}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def cut(path: Path) -> None:
    file = path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def double(path: Path) -> None:
    """The second shard also holds what the index places in the first."""
    file = path / "model-00002-of-00002.safetensors"
    _, tensors = ZLAB.files()
    save_file({name: tensors[name] for name in (*sorted(tensors)[1::2], "fc.weight")}, file)


def unindexed(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    del listed["weight_map"]["norm.weight"]
    index.write_text(json.dumps(listed))


def misplaced(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["fc.weight"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(listed))


BROKEN_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda path: (path / "model-00002-of-00002.safetensors").unlink(), r"model-00002-of-00002\.safetensors"),
    "shard cut short": (cut, r"model-00002-of-00002\.safetensors"),
    "key in two shards": (double, r"fc\.weight"),
    "key that the index forgets": (unindexed, r"norm\.weight"),
    "key in another shard than the index says": (misplaced, r"fc\.weight"),
    "index that is no JSON": (lambda path: (path / "model.safetensors.index.json").write_text("{"), "index"),
}


@pytest.mark.parametrize(("break_it", "names"), BROKEN_FILES.values(), ids=BROKEN_FILES.keys())
def test_a_broken_set_of_shards_names_what_is_broken(break_it: Callable[[Path], object], names: str, tmp_path: Path) -> None:
    shards(tmp_path)
    assert read_files(tmp_path, zlab_config()).warnings == ()
    break_it(tmp_path)
    with pytest.raises(EvalError, match=names) as caught:
        read_files(tmp_path, zlab_config())
    assert "\n" not in caught.value.problem
    assert caught.value.fix.endswith(".")


SPECIAL = {
    "end-of-sequence": (ZLAB, {"eos_token_id": 3}, {"eos_token_id": 2}),
    "end-of-sequence in a list": (ZLAB, {"eos_token_id": [2, 3]}, {"eos_token_id": [2, 4]}),
    "padding": (DEEPSPEC, {"pad_token_id": 3}, {"pad_token_id": 0}),
    "beginning-of-sequence": (SPECULATORS, layers(bos_token_id=3), layers(bos_token_id=1)),
}


@pytest.mark.parametrize(("form", "config", "right"), SPECIAL.values(), ids=SPECIAL.keys())
def test_a_mask_id_that_is_a_special_token_is_a_warning(
    form: Form, config: Change, right: Change, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (warning,) = read(tmp_path, form, config, {}).warnings
    assert "mask_token_id is 3, which config.json " in warning
    assert request.node.callspec.id.removesuffix(" in a list") + " token" in warning
    assert read(tmp_path, form, right, {}).warnings == ()
