"""The trainer: a run from its config to its last checkpoint, serial or through the pipeline, resumed exactly.

Everything random is a function of seed and step, so a run that is interrupted and resumed ends with the same bits as one
that is not (on one thread, and on the same number of drafter workers).
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from dflash_model.drafter.export import zlab_config
from dflash_model.drafter.spec import MaskPolicy
from dflash_model.errors import ConfigError, InputError, StageError
from dflash_model.target.backbone import load_backbone
from dflash_model.target.references import read_references
from dflash_model.target.tables import Tables, load_tables, write_tables
from dflash_model.training.anchors import draw_anchors
from dflash_model.training.batches import ANCHORS, NOISE, Batch, BatchPlan, generator_of
from dflash_model.training.checkpoints import checkpoint_path, load_checkpoint, newest_checkpoint, save_checkpoint
from dflash_model.training.config import TrainingConfig
from dflash_model.training.drafter_workers import DrafterWorkers, Replica, StepInput, StepSums, copy_to
from dflash_model.training.drafters import export_zlab, make_drafter, random_head, spec_of
from dflash_model.training.optimizers import Optimizers
from dflash_model.training.pipeline import DRAFTER, PREFETCH, TARGET, Pipeline
from dflash_model.training.sampling import Sampled, Sampler
from dflash_model.training.target_states import TargetForward
from dflash_model.training.telemetry import BUSY, StageClock, Telemetry

log = logging.getLogger(__name__)

TELEMETRY_NAME = "telemetry.jsonl"
Line = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingResult:
    """A finished run."""

    step: int
    """Finished steps."""

    checkpoint: Path
    """Its last training file."""

    drafter: Path
    """The last step in z-lab's layout."""

    last: Sampled | None
    """The last sample of metrics; None where no step was left to do."""


class Trainer:
    """One run: its target, drafter, optimizers and data, ready at the step where it begins."""

    def __init__(self, config: TrainingConfig, *, resume: bool = False) -> None:
        """Load everything. Raises InputError where `out` holds checkpoints and `resume` is False, and EvalError."""
        self.config = config
        torch.set_num_threads(config.pipeline.threads)
        newest = newest_checkpoint(config.out)
        if newest is not None and not resume:
            raise InputError(f"{config.out} holds {newest.name} already.", "Resume the run, or choose another directory.")
        self.tables = _tables_of(config.target)
        self._backbones = [
            load_backbone(config.target, dtype=config.pipeline.target_dtype, device=device)
            for device in config.pipeline.target_devices
        ]
        depth = self._backbones[0].num_layers
        self.spec = spec_of(config.drafter, tables=self.tables, num_target_layers=depth)
        _check_ids(config, depth, int(self.tables.facts["vocab_rows"]))
        references = read_references(config.data)
        self.plan = BatchPlan(
            references,
            lengths=config.batch.lengths,
            sequences=config.batch.sequences,
            seed=config.seed,
            pad_id=0,
        )
        trained = replace(self.spec, layer_masks=_causal(self.spec.layer_masks)) if config.made_fault.causal_block else self.spec
        answers = torch.tensor([token for reference in references for token in reference.completion_ids])
        frequencies = answers.bincount(minlength=len(self.tables.head))
        made = make_drafter(trained, self.tables, frequencies=frequencies, seed=config.seed, name=str(config.out))
        self.drafter = made.to(config.pipeline.drafter_devices[0])
        self.optimizers = Optimizers(self.drafter, config.optimizer, steps=config.steps)
        self.first_step = self._load(newest) if newest is not None else 0
        self.workers = DrafterWorkers([self._replica(index) for index in range(len(config.pipeline.drafter_devices))])

    def _replica(self, index: int) -> Replica:
        config, device = self.config, torch.device(self.config.pipeline.drafter_devices[index])
        tables = replace(self.tables, **{name: getattr(self.tables, name).to(device) for name in ("embed", "head", "norm")})
        head = random_head(self.tables, seed=config.seed).to(device) if config.made_fault.random_head else tables.head
        return Replica(
            self.drafter if index == 0 else copy_to(self.drafter, device),
            tables,
            head=head,
            form=config.effective_loss,
            backend=config.pipeline.attention,
            context_past_anchor=config.made_fault.context_past_anchor,
        )

    def _load(self, path: Path) -> int:
        state = load_checkpoint(path, decides_weights=self.config.what_decides_weights())
        self.drafter.load_state_dict(state["model_state_dict"])
        self.optimizers.load_state_dict(state["optimizer_state_dict"])
        log.info("%s: resumed from %s", self.config.out, path.name)
        return int(state["step"])

    def forward_workers(self) -> list[Callable[[Batch], StepInput]]:
        """One target-forward worker per device."""
        targets = [
            TargetForward(backbone, self.spec.tap_indices, pad_id=0, fault=self.config.made_fault) for backbone in self._backbones
        ]
        return [partial(self.step_input, target=target) for target in targets]

    def step_input(self, batch: Batch, target: TargetForward) -> StepInput:
        """Anchors and target states of a batch."""
        wanted = self.config.batch
        anchors = draw_anchors(
            batch.supervised,
            batch.documents,
            count=wanted.anchors,
            rule=wanted.anchor_rule,
            block_size=self.spec.block_size,
            generator=generator_of(self.config.seed, ANCHORS, batch.step),
        )
        noise = None
        if wanted.noise:
            shape = (*batch.token_ids.shape, self.spec.num_taps * self.spec.hidden_size)
            noise = torch.rand(shape, generator=generator_of(self.config.seed, NOISE, batch.step)).mul_(2).sub_(1)
            noise = (noise * wanted.noise).to(self._backbones[0].dtype)
        rows = target(batch.token_ids, batch.lengths, noise=noise)
        return StepInput(
            step=batch.step,
            tokens=batch.tokens,
            token_ids=batch.token_ids,
            supervised=batch.supervised,
            documents=batch.documents,
            anchors=anchors.positions,
            anchors_valid=anchors.valid,
            states=rows.states,
            final=rows.final,
        )

    def train_step(self, given: StepInput) -> StepSums:
        """One optimizer step. Asks no device for a value."""
        sums = self.workers.gradients(given)
        self.optimizers.step(given.step, sums.divisor)
        self.workers.spread()
        return sums

    def run(self, *, serial: bool = False, on_sample: Callable[[Line], None] | None = None) -> TrainingResult:
        """Train to the last step; write checkpoints and telemetry. `serial`: one stage after the other, for comparison."""
        source = _Serial(self) if serial else self._pipeline()
        sampler, last = Sampler(), None
        try:
            with source as stages:
                telemetry = Telemetry(stages.clocks)
                for given in stages:
                    with stages.clocks[DRAFTER].spending(BUSY):
                        sums = self.train_step(given)
                        sampler.add(sums)
                    telemetry.count(tokens=given.tokens, anchors=given.anchors.numel())
                    done = given.step + 1
                    if done % self.config.log_every == 0 or done == self.config.steps:
                        last = self._report(sampler.take(done, sums), on_sample) or last
                        self._write_line({"step": done} | telemetry.sample(queues=stages.queues()), on_sample)
                    if done % self.config.save_every == 0 or done in {*self.config.save_steps, self.config.steps}:
                        self.save(done)
            last = self._report(sampler.finish(), on_sample) or last
        finally:
            self.workers.close()
        path = checkpoint_path(self.config.out, self.config.steps)
        return TrainingResult(step=self.config.steps, checkpoint=path, drafter=self._export_dir(self.config.steps), last=last)

    def _pipeline(self) -> Pipeline[Batch, StepInput]:
        wanted = self.config.pipeline
        return Pipeline(
            self.plan.batch,
            self.forward_workers(),
            steps=range(self.first_step, self.config.steps),
            prefetched=wanted.prefetched_batches,
            queued=wanted.queued_states,
        )

    def save(self, step: int) -> Path:
        """Write the z-lab layout, then the raw training file, after `step` finished steps; returns the latter."""
        layout = zlab_config(self.spec)
        dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.config.save_dtype]
        export_zlab(self._export_dir(step), layout, self.drafter.state_dict(), dtype=dtype)
        path = checkpoint_path(self.config.out, step)
        save_checkpoint(
            path,
            model=self.drafter.state_dict(),
            optimizer=self.optimizers.state_dict(),
            step=step,
            args=layout | {"seed": self.config.seed, "training": self.config.what_decides_weights()},
        )
        log.info("%s: saved %s", self.config.out, path.name)
        return path

    def _export_dir(self, step: int) -> Path:
        return self.config.out / "drafters" / f"step-{step:06d}"

    def _report(self, sample: Sampled | None, on_sample: Callable[[Line], None] | None) -> Sampled | None:
        if sample is None:
            return None
        if not math.isfinite(sample.loss):
            raise StageError(
                f"The loss is {sample.loss} at step {sample.step} of {self.config.out}.", "Lower the learning rates."
            )
        self._write_line({"step": sample.step, "loss": sample.loss} | asdict(sample.metrics), on_sample)
        return sample

    def _write_line(self, line: Line, on_sample: Callable[[Line], None] | None) -> None:
        self.config.out.mkdir(parents=True, exist_ok=True)
        with (self.config.out / TELEMETRY_NAME).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if on_sample:
            on_sample(line)


class _Serial:
    """The pipeline's stages one after the other in the caller's thread."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.clocks = {name: StageClock(1) for name in (PREFETCH, TARGET, DRAFTER)}

    def __enter__(self) -> _Serial:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing runs behind."""

    def queues(self) -> dict[str, int]:
        """None are held."""
        return {"batches": 0, "states": 0}

    def __iter__(self) -> Iterator[StepInput]:
        """Each step's input, made when it is asked for."""
        forward = self._trainer.forward_workers()[0]
        for step in range(self._trainer.first_step, self._trainer.config.steps):
            with self.clocks[PREFETCH].spending(BUSY):
                batch = self._trainer.plan.batch(step)
            with self.clocks[TARGET].spending(BUSY):
                given = forward(batch)
            yield given


def train(config: TrainingConfig, *, resume: bool = False, on_sample: Callable[[Line], None] | None = None) -> TrainingResult:
    """A whole run. Raises EvalError."""
    started = time.perf_counter()
    result = Trainer(config, resume=resume).run(on_sample=on_sample)
    log.info("%s: %d steps, %.0f s", config.out, result.step, time.perf_counter() - started)
    return result


def _tables_of(target: Path) -> Tables:
    with TemporaryDirectory(prefix="dflash-tables-") as directory:
        write_tables(target, Path(directory))
        return load_tables(Path(directory), torch.float32)


def _causal(masks: tuple[MaskPolicy, ...]) -> tuple[MaskPolicy, ...]:
    return tuple(replace(policy, in_block="causal") for policy in masks)


def _check_ids(config: TrainingConfig, depth: int, vocabulary: int) -> None:
    ids = config.drafter.target_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < depth:
        raise ConfigError(
            f"drafter.target_layer_ids is {list(ids)}, but the target's layers are 0 to {depth - 1}.", "List ascending layers."
        )
    if not 0 <= config.drafter.mask_token_id < vocabulary:
        raise ConfigError(
            f"drafter.mask_token_id is {config.drafter.mask_token_id}, but the target's embedding has {vocabulary} rows.",
            "Choose an id with an embedding row.",
        )
