"""What the training pipeline gains over doing one stage after the other, and how often a step makes a GPU's host wait.

    python tests/benchmarks/bench_training.py [--json] [--steps 12] [--repeats 5]

A random target and drafter, large enough that arithmetic and not Python decides, on one thread an operation: one target
worker and one drafter worker on two cores. Serial and pipelined runs alternate; the ratio is that of their median times.
On a machine that is busy otherwise the pipeline's two threads also get two shares, so the load is printed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from reporting import arguments, report, row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash_model.target.references import LENGTH, Reference, write_references
from dflash_model.training.config import TrainingConfig, parse_config
from dflash_model.training.trainer import Trainer
from tests.host_syncs import HostSyncs, counters_of

VOCABULARY = 1024
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip


def make_inputs(directory: Path) -> None:
    """A random target and made-up answers."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3", **SIZES)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config, dtype=torch.float32).save_pretrained(directory / "target")
    tokens = torch.randint(4, VOCABULARY, (64, 250)).tolist()
    references = [
        Reference(
            sample_id=f"s{n}", prompt_ids=tuple(ids[:30]), completion_ids=tuple(ids[30:]), overshoot_ids=(), finish=LENGTH,
            logprobs=None, engine="random",
        )
        for n, ids in enumerate(tokens)
    ]  # fmt: skip
    write_references(directory / "answers.jsonl", references)


def config_of(directory: Path, steps: int) -> TrainingConfig:
    """One target worker, one drafter worker, one thread each."""
    values = {
        "target": "target", "data": "answers.jsonl", "out": "run", "steps": steps, "save_every": 10**6, "log_every": 10**6,
        "drafter": {
            "target_layer_ids": [1, 3, 4], "mask_token_id": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64,
            "intermediate_size": 704,
        },
        "batch": {"sequences": 4, "anchors": 12, "lengths": [256]},
        "pipeline": {"threads": 1},
    }  # fmt: skip
    return parse_config(values, base=directory)


def seconds_of(config: TrainingConfig, *, serial: bool, number: int) -> float:
    """Wall time of the steps alone; loading is not counted, the last checkpoint is."""
    trainer = Trainer(replace(config, out=config.out / f"{number}-{'serial' if serial else 'pipeline'}"))
    start = time.perf_counter()
    trainer.run(serial=serial)
    return time.perf_counter() - start


def syncs_per_step(config: TrainingConfig, steps: int = 4) -> float:
    """Operations that ask the device for something, per step after the first."""
    trainer = Trainer(replace(config, out=config.out / "syncs", batch=replace(config.batch, noise=0.1)))
    forward = trainer.forward_workers()[0]
    trainer.train_step(forward(trainer.plan.batch(0)))
    batches = [trainer.plan.batch(step) for step in range(1, 1 + steps)]
    with HostSyncs(host_scalars=counters_of(*trainer.optimizers.parts.values())) as syncs:
        for batch in batches:
            trainer.train_step(forward(batch))
    trainer.workers.close()
    return sum(syncs.counts.values()) / steps


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    with TemporaryDirectory() as directory:
        make_inputs(Path(directory))
        config = config_of(Path(directory), options.steps)
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(options.repeats):
            for serial in (True, False):
                times[serial].append(seconds_of(config, serial=serial, number=number))
        ratio = statistics.median(times[True]) / statistics.median(times[False])
        syncs = syncs_per_step(config)
    print(f"load {load:.1f} on {cores} cores before; {cores} are used by one target worker and one drafter worker")
    rows = [
        row("pipeline_vs_serial", ratio, "x", least=1.2) if cores >= 2 else
        row("pipeline_vs_serial", None, "x", least=1.2, reason="this process may use one core only"),
        row("serial_steps_per_s", options.steps / statistics.median(times[True]), "1/s"),
        row("pipeline_steps_per_s", options.steps / statistics.median(times[False]), "1/s"),
        row("host_sync_per_step", syncs, "1", most=0),
    ]  # fmt: skip
    report("training", rows, packages=["torch", "transformers"], as_json=options.json)


if __name__ == "__main__":
    main()
