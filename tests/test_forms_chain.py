"""Every form of one drafter through discover, relay, extract and replay: the same drafter drafts the same tokens.

The stage programs run in this process; the target and its states are made once.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_model.artifacts import Manifest
from dflash_model.checkpoint.directory import LocalDirectory
from dflash_model.checkpoint.extract import plan_extraction
from dflash_model.checkpoint.open_table import open_directory_table
from dflash_model.digests import json_digest
from dflash_model.drafter.export import speculators_config, speculators_names
from dflash_model.drafter.reading import read_directory, tensors_of_plan
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.replay.records import SampleRecords
from dflash_model.stages import extract_weights, hidden_states, identify_target, replay, target_tables
from dflash_model.stages.protocol import Context, Request
from dflash_model.stages.registry import STAGES
from dflash_model.storage import artifacts_dir, find_artifact, writing_artifact
from dflash_model.target.references import LENGTH, Reference, write_references
from tasks.configs import selection_of
from tasks.describing import writable_config
from tasks.remote.drafters import DIRECTORY, discover
from tasks.remote.incoming import local_facts
from tasks.remote.local import LocalHost
from tasks.remote.selective import relay
from tests.drafter_forms import changed
from tests.tiny_drafters import PAIR

CONFIG: dict[str, Any] = json.loads((PAIR / "drafter" / "config.json").read_text())
WEIGHTS = load_file(PAIR / "drafter" / "model.safetensors")
ARGS = {
    "block_size": 8, "mask_token_id": 3, "target_layer_ids": "1,3,4", "rope_theta": 1e4, "rms_norm_eps": 1e-6,
    "layer_types": ["full_attention"] * 2, "sample_from_anchor": False,
}  # fmt: skip
VOCABULARY, HIDDEN = 512, 96
KEPT = [number for number in range(VOCABULARY) if number % 5]
COMPARED_RANKS = 8
"""A selector ranks only the candidates that it is given."""

TAPS = [0, 1, 2, 3, 4, 5]
STAGE_OF = {
    "identify-target": identify_target, "target-tables": target_tables, "hidden-states": hidden_states,
    "extract-weights": extract_weights, "replay": replay,
}  # fmt: skip


def spec_of(config: dict[str, Any], path: Path) -> DrafterSpec:
    with LocalDirectory(path) as directory:
        return read_directory(tensors_of_plan(plan_extraction(open_directory_table(directory))), config).spec


SPEC = spec_of(CONFIG, PAIR / "drafter")


def hardness(request: dict[str, Any]) -> float:
    """Tokens per step: the fewer, the more blocks there are to compare."""
    return float(np.mean(request["acceptance_lengths"]))


def target_tensor(name: str) -> Tensor:
    return next(tensor for key, tensor in load_file(PAIR / "target" / "model.safetensors").items() if key.endswith(name))


def save(path: Path, config: dict[str, Any] | None, tensors: dict[str, Tensor]) -> None:
    path.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))


def sharded(path: Path) -> None:
    save(path, CONFIG, {})
    (path / "model.safetensors").unlink()
    names = sorted(WEIGHTS)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in halves.items():
        save_file({name: WEIGHTS[name] for name in held}, path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in halves.items() for name in held}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def training_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {f"module._orig_mod.{name}": tensor.float() for name, tensor in WEIGHTS.items()}
    torch.save({"model_state_dict": state, "optimizer_state_dict": {"m": torch.ones(9)}, "args": ARGS, "step": 7}, path)


def specforge(path: Path) -> None:
    for step in (5, 10):
        state = path / f"r-step{step}" / "training_state.pt"
        state.parent.mkdir(parents=True)
        factor = 1.0 if step == 10 else 0.5
        weights = {name: tensor * factor for name, tensor in WEIGHTS.items()}
        torch.save({"draft_state_dict": weights, "global_step": step, "run_id": "r"}, state)
        os.utime(state, ns=(10**18 + step, 10**18 + step))
    (path / "r-latest").symlink_to("r-step10", target_is_directory=True)


def speculators(path: Path, more: dict[str, Tensor] | None = None, **changes: Any) -> None:
    save(path, changed(speculators_config(SPEC), changes), WEIGHTS | (more or {}))


def whole_map(path: Path) -> None:
    """A reduced vocabulary that happens to be all of it."""
    tables = {
        "lm_head.weight": target_tensor("lm_head.weight"),
        "d2t": torch.zeros(VOCABULARY).long(),
        "t2d": torch.ones(VOCABULARY).bool(),
    }
    speculators(path, tables)


def reduced(path: Path) -> None:
    marks = torch.tensor([number in set(KEPT) for number in range(VOCABULARY)])
    offsets = torch.tensor(KEPT) - torch.arange(len(KEPT))
    tables = {"lm_head.weight": target_tensor("lm_head.weight")[marks], "d2t": offsets, "t2d": marks}
    speculators(path, tables, draft_vocab_size=len(KEPT))


def dflash2(path: Path, *, in_speculators: bool) -> None:
    """Convolutions that pass everything on and a selector that prefers nothing: plain DFlash's tokens."""
    rank, group = 4, 16
    tensors = dict(WEIGHTS)
    for layer in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            base = torch.zeros(2, 2, HIDDEN)
            base[:, 0] = 1.0
            tensors[f"layers.{layer}.{conv}.base_kernel"] = base
            tensors[f"layers.{layer}.{conv}.kernel_projection.weight"] = torch.zeros(2 * 2 * HIDDEN // group, HIDDEN)
    for codebook in ("predecessor_codebook", "successor_codebook"):
        tensors[f"candidate_selector.{codebook}"] = torch.zeros(VOCABULARY, rank)
    tensors["candidate_selector.hidden_projection.weight"] = torch.zeros(rank, HIDDEN)
    sizes = {"conv_kernel_size": 2, "conv_group_size": group, "selector_rank": rank, "selector_top_k": 16}
    if in_speculators:
        config = changed(
            speculators_config(SPEC), sizes | {"speculators_model_type": "dflash2", "architectures": ["DFlash2DraftModel"]}
        )
        save(path, config, {speculators_names([name])[name]: tensor for name, tensor in tensors.items()})
    else:
        save(path, changed(CONFIG, {"architectures": ["DFlash2DraftModel"], "dflash_config": sizes}), tensors)


def deepspec(path: Path, **changes: Any) -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("dflash_config", "auto_map")}
    config |= {"architectures": ["Qwen3DSparkModel"], "mask_token_id": 3, "target_layer_ids": [1, 3, 4], "num_anchors": 512}
    config |= {"markov_rank": 0, "enable_confidence_head": False}
    tables = {"embed_tokens.weight": target_tensor("embed_tokens.weight"), "lm_head.weight": target_tensor("lm_head.weight")}
    save(path, config | changes, WEIGHTS | tables)


NEW_PLACES = changed(
    CONFIG, {"block_size": ..., "rope_theta": ..., "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "dflash_config": {"block_size": 8}}
)  # fmt: skip
COPIES = ("embed_tokens.weight", "lm_head.weight")
SAME: dict[str, Callable[[Path], object]] = {
    "z-lab, new places": lambda path: save(path, NEW_PLACES, WEIGHTS),
    "sharded": sharded,
    "prefixed": lambda path: save(path, CONFIG, {f"module._orig_mod.{name}": tensor for name, tensor in WEIGHTS.items()}),
    "float32": lambda path: save(path, CONFIG, {name: tensor.float() for name, tensor in WEIGHTS.items()}),
    "training file": lambda path: training_file(path),
    "SpecForge's run": specforge,
    "speculators 0.9": speculators,
    "speculators 0.8": lambda path: speculators(path, {name: target_tensor(name) for name in COPIES}),
    "speculators, whole map": whole_map,
    "a written config": lambda path: save(path, writable_config(SPEC), WEIGHTS),
    "DFlash2 at its start": lambda path: dflash2(path, in_speculators=False),
    "DFlash2 in speculators": lambda path: dflash2(path, in_speculators=True),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Hosts, and what every replay stands on."""

    train: LocalHost
    evaluator: LocalHost
    inputs: dict[str, str]
    """Role -> artifact key."""

    baseline: list[SampleRecords]
    """Of the published directory as it is."""


def make(host: LocalHost, stage: str, inputs: dict[str, str], parameters: dict[str, Any], local: dict[str, Any]) -> Manifest:
    """Run one stage in this process."""
    key = f"{stage}-{json_digest([inputs, parameters, local])[:16]}"
    work_dir = Path(host.work_dir)
    request = Request(stage=stage, key=key, work_dir=work_dir, inputs=inputs, parameters=parameters, local=local)
    silent = os.open(os.devnull, os.O_WRONLY)
    try:
        STAGE_OF[stage].run(Context(request=request, kind=STAGES[stage].kind, answer_descriptor=silent))
    finally:
        os.close(silent)
    manifest = find_artifact(work_dir, key)
    assert manifest is not None
    return manifest


def replay_of(ground: Ground | dict[str, str], evaluator: LocalHost, checkpoint: Manifest) -> Manifest:
    inputs = (ground if isinstance(ground, dict) else ground.inputs) | {"checkpoint": checkpoint.key}
    chosen = {"shard": [0, 1], "tail": "truncated", "streak_widths": [4], "tree_budgets": [], "kept_candidates": 8}
    return make(evaluator, "replay", inputs, chosen, {})


def replayed(ground: Ground | dict[str, str], evaluator: LocalHost, checkpoint: Manifest) -> list[SampleRecords]:
    manifest = replay_of(ground, evaluator, checkpoint)
    files = sorted((artifacts_dir(Path(evaluator.work_dir)) / manifest.key / "records").iterdir())
    return [SampleRecords.load(file) for file in files]


def extracted(train: LocalHost, evaluator: LocalHost, pattern: str) -> Manifest:
    """discover, relay, extract."""
    drafter = discover(train, pattern, settle_s=0.0)
    chosen: dict[str, Any] = {"source_digest": drafter.digest, "form": drafter.form, "tokenizer_sha256": None}
    if drafter.form != DIRECTORY:
        given = {
            name: value for name, value in ARGS.items() if name not in ("layer_types", "sample_from_anchor", "target_layer_ids")
        }
        options = given | {"target_layer_ids": [1, 3, 4]}
        chosen |= {"state_key": None, "config": None, "config_from": None, "options": options}
    selection = selection_of(drafter, {"state_key": None}, cast="keep")
    journals = Path(evaluator.work_dir).parent / "journals"
    relay(drafter, selection, train, evaluator, journals=journals, on_bytes=lambda _done, _total: None)
    return make(evaluator, "extract-weights", {}, chosen, local_facts(drafter, selection, evaluator))


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    home = tmp_path_factory.mktemp("forms")
    train, evaluator = (LocalHost(name, home / name, threads=1, slots=1) for name in ("train", "eval"))
    requests = sorted(json.loads((PAIR / "oracle.json").read_text())["requests"], key=hardness)[:1]
    references = [
        Reference(
            sample_id=f"r{number}",
            prompt_ids=tuple(request["prompt_ids"]),
            completion_ids=tuple(request["output_ids"][:24]),
            overshoot_ids=tuple(request["output_ids"][24:31]),
            finish=LENGTH,
            logprobs=None,
            engine="transformers",
        )
        for number, request in enumerate(requests)
    ]
    with writing_artifact(Path(evaluator.work_dir), kind="references", key="references") as writer:
        write_references(writer.path / "references.jsonl", references)
    local = {"target_path": str(PAIR / "target")}
    target = make(evaluator, "identify-target", {}, {"path": local["target_path"], "host": "eval", "listing": []}, {})
    tables = make(evaluator, "target-tables", {"target": target.key}, {}, local)
    inputs = {"references": "references", "tables": tables.key}
    states = make(evaluator, "hidden-states", inputs | {"target": target.key}, {"taps": TAPS, "dtype": "float32"}, local)
    inputs |= {"states": states.key}
    save(Path(train.work_dir) / "published", CONFIG, WEIGHTS)
    checkpoint = extracted(train, evaluator, "published")
    return Ground(train=train, evaluator=evaluator, inputs=inputs, baseline=replayed(inputs, evaluator, checkpoint))


NUMBERS = itertools.count()


def through(ground: Ground, build: Callable[[Path], object]) -> tuple[Manifest, list[SampleRecords]]:
    name = f"drafters/{next(NUMBERS)}" + (".pt" if build is SAME["training file"] else "")
    build(Path(ground.train.work_dir) / name)
    checkpoint = extracted(ground.train, ground.evaluator, name)
    return checkpoint, replayed(ground, ground.evaluator, checkpoint)


def same_tokens(ours: list[SampleRecords], theirs: list[SampleRecords]) -> bool:
    return all(
        np.array_equal(a.anchors, b.anchors)
        and np.array_equal(np.minimum(a.true_rank, COMPARED_RANKS), np.minimum(b.true_rank, COMPARED_RANKS))
        and np.array_equal(a.top_ids[..., 0], b.top_ids[..., 0])
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("build", SAME.values(), ids=SAME.keys())
def test_the_same_drafter_in_another_form_drafts_the_same_tokens(build: Callable[[Path], object], ground: Ground) -> None:
    checkpoint, records = through(ground, build)
    assert len(ground.baseline[0].anchors) > 5
    assert same_tokens(records, ground.baseline)
    assert len(checkpoint.facts["warnings"]) == (2 if build is specforge else 0)  # its files say nothing of masks and slots


def test_deepspecs_own_tables_and_shift_are_a_zlab_drafter_that_samples_from_the_anchor(ground: Ground) -> None:
    checkpoint, records = through(ground, deepspec)
    assert (checkpoint.facts["spec"]["owns_embedding"], checkpoint.facts["spec"]["owns_head"]) == (True, True)
    shifted = changed(CONFIG, {"dflash_config": {"sample_from_anchor": True}})
    _, theirs = through(ground, lambda path: save(path, shifted, WEIGHTS))
    assert same_tokens(records, theirs)
    assert records[0].top_ids.shape[1] == 8
    _, embedding = through(ground, lambda path: deepspec(path, target_layer_ids=[-1, 3, 4]))
    assert not same_tokens(records, embedding)  # layer -1, the embedding's output, goes all the way
    assert not np.array_equal(records[0].top_ids[:, :7, 0], ground.baseline[0].top_ids[: len(records[0].anchors), :, 0])


def test_a_reduced_vocabulary_drafts_only_its_own_ids_and_otherwise_the_same(ground: Ground) -> None:
    _, records = through(ground, reduced)
    for ours, theirs in zip(records, ground.baseline, strict=True):
        rows = np.searchsorted(theirs.anchors, ours.anchors)
        shared = np.isin(ours.anchors, theirs.anchors)
        assert np.isin(ours.top_ids, KEPT).all()
        best, whole = ours.top_ids[shared, :, 0], theirs.top_ids[rows[shared], :, 0]
        agreeing = np.isin(whole, KEPT)
        assert agreeing.any()
        assert not agreeing.all()
        assert np.array_equal(best[agreeing], whole[agreeing])


@pytest.mark.parametrize(
    "wrong",
    [
        {"aux_hidden_state_layer_ids": [1, 3, 4]},  # z-lab's numbers, unconverted
        {"sample_from_anchor": True},
        {"transformer_layer_config": {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 3}},
    ],
)  # fmt: skip
def test_each_convention_matters(wrong: dict[str, Any], ground: Ground) -> None:
    _, records = through(ground, lambda path: speculators(path, **wrong))
    assert records[0].true_rank.shape != ground.baseline[0].true_rank.shape or not same_tokens(records, ground.baseline)


def test_a_mask_row_that_nothing_trained_is_said_by_the_replay(ground: Ground) -> None:
    def build(factor: float) -> Callable[[Path], object]:
        row = target_tensor("embed_tokens.weight")[3] * factor
        return lambda path: save(path, CONFIG, WEIGHTS | {"mask_embedding": row})

    checkpoint, records = through(ground, build(1.0))
    assert same_tokens(records, ground.baseline)
    assert replay_of(ground, ground.evaluator, checkpoint).facts["warnings"] == []
    checkpoint, records = through(ground, build(0.0))
    assert not same_tokens(records, ground.baseline)
    (warning,) = replay_of(ground, ground.evaluator, checkpoint).facts["warnings"]
    assert warning.startswith("mask_embedding is nearly zero (norm 0, ")
