"""Whole small training runs: reproducible bit for bit, resumed exactly, killed without loss, and evaluable afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from dflash_model.checkpoint.extract import extract_weights
from dflash_model.checkpoint.source import LocalFile
from dflash_model.drafter.bare import read_bare
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.zlab import spec_from_zlab
from dflash_model.errors import CheckpointError, ConfigError, InputError, StageError
from dflash_model.training.__main__ import main
from dflash_model.training.checkpoints import newest_checkpoint
from dflash_model.training.config import TrainingConfig, read_config
from dflash_model.training.faults import FAULTS
from dflash_model.training.target_states import TargetForward
from dflash_model.training.trainer import TELEMETRY_NAME, Trainer, train
from tests.host_syncs import HostSyncs, counters_of
from tests.tiny_drafters import shapes_in
from tests.training_runs import a_config, make_target, same, weights_in

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _one_thread():  # type: ignore[no-untyped-def]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def first(base: Path) -> TrainingConfig:
    """A run that went through."""
    torch.set_num_threads(1)
    config = a_config(base, "first")
    train(config)
    return config


def step_8(config: TrainingConfig) -> dict[str, torch.Tensor]:
    return weights_in(config.out / "step-000008.pt")


def test_trained_twice_from_seed_the_weights_are_the_same_bit_for_bit(base: Path, first: TrainingConfig) -> None:
    again = a_config(base, "again")
    train(again)
    assert same(step_8(first), step_8(again))
    other_seed = a_config(base, "other-seed", seed=1)
    train(other_seed)
    assert not same(step_8(first), step_8(other_seed))
    exported = [(config.out / "drafters" / "step-000008" / "model.safetensors").read_bytes() for config in (first, again)]
    assert exported[0] == exported[1]


def test_resumed_in_the_middle_it_ends_as_if_it_had_never_stopped(base: Path, first: TrainingConfig) -> None:
    halves = a_config(base, "halves")
    trainer = Trainer(halves)
    steps = iter(trainer.plan.batch(step) for step in range(4))
    forward = trainer.forward_workers()[0]
    for batch in steps:
        trainer.train_step(forward(batch))
    trainer.save(4)
    trainer.workers.close()
    with pytest.raises(InputError, match=r"holds step-000004\.pt already"):
        Trainer(halves)
    assert Trainer(halves, resume=True).first_step == 4
    train(halves, resume=True)
    assert same(step_8(first), step_8(halves))


def test_the_pipelines_shape_changes_no_bit(base: Path, first: TrainingConfig) -> None:
    serial = a_config(base, "serial")
    Trainer(serial).run(serial=True)
    assert same(step_8(first), step_8(serial))
    two = a_config(base, "two", pipeline={"target_devices": ["cpu", "cpu"], "queued_states": 1})
    train(two)
    assert same(step_8(first), step_8(two))


def test_two_drafter_workers_add_the_gradients_of_their_shards(base: Path, first: TrainingConfig) -> None:
    one, two = Trainer(a_config(base, "one-w")), Trainer(a_config(base, "two-w", pipeline={"drafter_devices": ["cpu", "cpu"]}))
    given = one.forward_workers()[0](one.plan.batch(0))
    one_sums, two_sums = one.workers.gradients(given), two.workers.gradients(given)
    assert float(one_sums.loss) == pytest.approx(float(two_sums.loss), rel=1e-5)
    assert torch.equal(one_sums.metrics, two_sums.metrics)
    for (name, mine), theirs in zip(one.drafter.named_parameters(), two.drafter.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, atol=1e-4, rtol=1e-4), name  # type: ignore[arg-type]
    two.optimizers.step(0, two_sums.divisor)
    two.workers.spread()
    replica = two.workers._others[0].drafter
    assert same(two.drafter.state_dict(), replica.state_dict())
    assert all(parameter.grad is None for parameter in replica.parameters())


def test_it_learns(base: Path) -> None:
    config = a_config(base, "learns", steps=60, save_every=60, log_every=10, batch={"sequences": 6, "anchors": 8})
    train(config)
    lines = [json.loads(line) for line in (config.out / TELEMETRY_NAME).read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    samples = [line for line in lines if "stages" in line]
    assert len(losses) == len(samples) == 6
    assert losses[-1] < 0.5 * losses[0]
    assert [line["step"] for line in samples] == [10, 20, 30, 40, 50, 60]
    assert all(line["tokens_per_s"] > 0 and line["bottleneck"] in line["stages"] for line in samples)


def shapes_and_config(config: TrainingConfig) -> tuple[dict[str, tuple[int, ...]], dict[str, object]]:
    directory = config.out / "drafters" / "step-000008"
    return shapes_in(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())


def comparable(spec: DrafterSpec) -> DrafterSpec:
    return replace(spec, provenance={}, source_format="")


@pytest.mark.parametrize(
    "drafter",
    [
        {},
        {"layer_types": ["sliding_attention"], "sliding_window": 5},
        {"layer_types": ["sliding_attention"], "sliding_window": 5, "is_causal": False},
        {"is_causal": True},
        {"sample_from_anchor": True},
        {"rotary_dims": 8},
        {"own_tables": True},
        {"draft_vocab_size": 30},
        {"family": "dflash2", "selector_rank": 4, "selector_top_k": 5},
    ],
    ids=str,
)
def test_what_it_saves_is_read_back_as_the_drafter_that_was_trained(
    base: Path, tmp_path: Path, drafter: dict[str, object]
) -> None:
    config = replace(a_config(base, "x", drafter=drafter, save_dtype="float32"), out=tmp_path / "run")
    trainer = Trainer(config)
    raw = trainer.save(8)
    shapes, written = shapes_and_config(config)
    assert comparable(spec_from_zlab(written, shapes)) == comparable(trainer.spec)
    load_drafter(config.out / "drafters" / "step-000008" / "model.safetensors", trainer.spec)
    with LocalFile(raw) as source:
        report = extract_weights(source, tmp_path / "extracted.safetensors", keep_vocab="own_tables" in drafter)
    reading = read_bare(shapes_in(tmp_path / "extracted.safetensors"), saved_args=report.facts["args"], config=None)
    bare = reading.spec
    assert comparable(bare) == comparable(trainer.spec)
    assert reading.warnings == ()
    assert report.facts["step"] == 8
    extracted = load_drafter(tmp_path / "extracted.safetensors", bare)
    assert same(extracted.state_dict(), trainer.drafter.state_dict())


@pytest.mark.parametrize(
    "drafter",
    [{"own_tables": True}, {"draft_vocab_size": 30}, {"family": "dflash2", "selector_rank": 4, "selector_top_k": 5}],
    ids=str,
)
@pytest.mark.parametrize("labels", ["data", "verifier"])
def test_every_form_learns_without_touching_frozen_tables(
    base: Path, tmp_path: Path, drafter: dict[str, object], labels: str
) -> None:
    config = replace(a_config(base, "x", drafter=drafter, loss={"labels": labels}), out=tmp_path)
    trainer = Trainer(config)
    before = {name: value.clone() for name, value in trainer.drafter.state_dict().items()}
    forward = trainer.forward_workers()[0]
    for step in range(2):
        sums = trainer.train_step(forward(trainer.plan.batch(step)))
        assert bool(torch.isfinite(sums.loss))
    trainer.workers.close()
    frozen = {name for name, value in trainer.drafter.state_dict().items() if torch.equal(value, before[name])}
    assert frozen == {"embed_tokens.weight", "d2t"} & before.keys()


LABELS_OF = {"noise_on_labels": "verifier_best", "soft_labels_shifted": "verifier"}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_changes_the_weights_and_not_what_is_declared(base: Path, tmp_path: Path, fault: str) -> None:
    changes = {"loss": {"labels": LABELS_OF.get(fault, "data")}, "batch": {"noise": 0.8 if fault == "noise_on_labels" else 0.0}}
    specs, weights = [], []
    for name in (None, fault):
        config = replace(a_config(base, "x", fault=name, **changes), out=tmp_path / str(name))
        trainer = Trainer(config)
        forward = trainer.forward_workers()[0]
        trainer.train_step(forward(trainer.plan.batch(0)))
        trainer.workers.close()
        specs.append(trainer.spec)
        weights.append({key: value.detach().clone() for key, value in trainer.drafter.state_dict().items()})
    assert specs[0] == specs[1]
    assert not same(weights[0], weights[1])
    assert all(bool(torch.isfinite(value).all()) for value in weights[1].values())


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_text"])
def test_a_step_asks_no_device_for_a_value(base: Path, tmp_path: Path, kind: str) -> None:
    where = base if kind == "qwen3" else make_target(tmp_path, kind)
    for labels in ("data", "verifier_best", "verifier"):
        trainer = Trainer(a_config(where, "x", loss={"labels": labels}, batch={"noise": 0.1}))
        forward = trainer.forward_workers()[0]
        batches = [trainer.plan.batch(step) for step in range(2)]
        trainer.train_step(forward(batches[0]))
        with HostSyncs(host_scalars=counters_of(*trainer.optimizers.parts.values())) as syncs:
            given = forward(batches[1])
            trainer.train_step(given)
        assert dict(syncs.counts) == {}
        with HostSyncs() as syncs:
            float(given.states.sum())
            given.token_ids[given.supervised]
        assert set(syncs.counts) >= {"aten::_local_scalar_dense", "aten::index"}, "the counter must notice such things"


def test_a_diverged_run_ends_with_that_word(base: Path) -> None:
    config = a_config(base, "nan", log_every=1)
    trainer = Trainer(config)
    with torch.no_grad():
        trainer.drafter.norm.weight.fill_(torch.nan)
    with pytest.raises(StageError, match="loss is nan at step 1"):
        trainer.run()


def test_a_failing_target_ends_the_run_with_its_error(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: TargetForward, token_ids: torch.Tensor, lengths: torch.Tensor, **options: object) -> None:
        raise StageError("The target's forward failed.", "Use a larger device.")

    monkeypatch.setattr(TargetForward, "__call__", failing)
    with pytest.raises(StageError, match="forward failed"):
        train(a_config(base, "failing"))


def test_a_damaged_or_foreign_checkpoint_is_refused(base: Path, tmp_path: Path) -> None:
    config = replace(a_config(base, "x"), out=tmp_path)
    trainer = Trainer(config)
    path = trainer.save(4)
    with pytest.raises(ConfigError, match=r"seed 0, the config says 1"):
        Trainer(replace(config, seed=1), resume=True)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        Trainer(config, resume=True)
    torch.save({"step": 4}, path)
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        Trainer(config, resume=True)


def test_killed_in_the_middle_it_goes_on_and_ends_as_if_it_had_not_been(base: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG.format(base=base).replace("steps: 3", "steps: 60\nsave_every: 1"))
    command = [sys.executable, "-m", "dflash_model.training", str(tmp_path / "run.yaml")]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=os.environ | ONE_THREAD)
    deadline = time.monotonic() + 120
    while reached(tmp_path / "run") < 3:
        assert child.poll() is None, child.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    child.kill()
    child.communicate()
    assert reached(tmp_path / "run") < 60
    (tmp_path / "run" / "step-000059.pt.part-1").write_bytes(b"half")
    config = read_config(tmp_path / "run.yaml")
    assert Trainer(config, resume=True).first_step == reached(tmp_path / "run")
    train(config, resume=True)
    whole = replace(config, out=tmp_path / "whole", save_every=60)
    train(whole)
    assert same(weights_in(config.out / "step-000060.pt"), weights_in(whole.out / "step-000060.pt"))


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def reached(directory: Path) -> int:
    newest = newest_checkpoint(directory)
    return int(newest.stem.removeprefix("step-")) if newest else 0


def test_the_command_line_trains_and_reports(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = yaml.safe_load(CONFIG.format(base=base))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    assert main([str(tmp_path / "run.yaml")]) == 0
    out = capsys.readouterr().out
    assert "trained to step 3" in out
    assert "tokens/s" in out
    assert main([str(tmp_path / "run.yaml")]) == 2
    assert "fix: Resume the run" in capsys.readouterr().err


CONFIG = """
target: {base}/target
data: {base}/answers.jsonl
out: run
steps: 3
log_every: 1
drafter: {{target_layer_ids: [0, 2], mask_token_id: 3, num_layers: 1, num_heads: 2, num_kv_heads: 1, head_dim: 16}}
"""
