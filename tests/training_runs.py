"""A tiny random target with made-up answers, and configs of runs on it, for tests of the trainer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from dflash_model.target.references import LENGTH, Reference, write_references
from dflash_model.training.config import TrainingConfig, parse_config
from tests.tiny_targets import tiny_model

VOCABULARY = 40


def made_up_references(count: int = 12) -> list[Reference]:
    """Answers that count upwards from the prompt's last token: easy to learn, all of different lengths."""
    rng = random.Random(0)
    references = []
    for number in range(count):
        prompt = tuple(rng.randrange(4, VOCABULARY) for _ in range(rng.randint(3, 6)))
        answer = tuple(4 + (prompt[-1] + step) % (VOCABULARY - 4) for step in range(1, rng.randint(12, 20)))
        references.append(
            Reference(
                sample_id=f"s{number}", prompt_ids=prompt, completion_ids=answer, overshoot_ids=(), finish=LENGTH, logprobs=None,
                engine="made up",
            )
        )  # fmt: skip
    return references


def make_target(directory: Path, kind: str = "qwen3") -> Path:
    """The saved target, and its answers beside it in answers.jsonl."""
    tiny_model(kind).save_pretrained(directory / "target")
    write_references(directory / "answers.jsonl", made_up_references())
    return directory


def a_config(base: Path, out: str, **changes: Any) -> TrainingConfig:
    """A run of 8 steps; a mapping among `changes` is laid over the section of that name."""
    values: dict[str, Any] = {
        "target": "target", "data": "answers.jsonl", "out": out, "steps": 8, "save_every": 4, "log_every": 4,
        "drafter": {
            "target_layer_ids": [0, 2], "mask_token_id": 3, "block_size": 4, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1,
            "head_dim": 16, "intermediate_size": 24,
        },
        "batch": {"sequences": 3, "anchors": 4, "lengths": [20, 32]},
        "optimizer": {"warmup_steps": 2},
    }  # fmt: skip
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_config(values, base=base)


def weights_in(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The model of a training file."""
    import argparse

    with torch.serialization.safe_globals([argparse.Namespace]):
        state: dict[str, torch.Tensor] = torch.load(checkpoint, weights_only=True)["model_state_dict"]
    return state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
