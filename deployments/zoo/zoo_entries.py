"""The zoo's table, read: one entry a drafter, with the training config it is made by."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import yaml

from dflash_model.training.config import BatchConfig, DrafterConfig, OptimizerConfig, TrainingConfig, parse_config
from dflash_model.training.losses import LossForm

HERE = Path(__file__).resolve().parent
TABLE = HERE / "zoo.yaml"
DRAFTERS = HERE / "drafters"
PROMPTS = HERE / "prompts.jsonl"
BUILD = HERE.parent.parent / "build" / "zoo"
NOTES_NAME = "training.json"
"""Beside each drafter: what it is, what decided its weights, and its training's own last metrics."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One training run of the zoo."""

    name: str
    what: str
    target: str
    config: TrainingConfig
    snapshots: tuple[int, ...]

    def drafters(self) -> list[tuple[str, int]]:
        """(name, step) of every drafter that the run leaves: snapshots are named by their share of the steps."""
        partial = [(f"{self.name}-{100 * step // self.config.steps:03d}pct", step) for step in self.snapshots]
        return [*partial, (self.name, self.config.steps)]

    def digest(self) -> str:
        """Of everything that decides its weights and is no default: a drafter with another digest is trained anew."""
        decides = self.config.what_decides_weights() | {"target": self.target}
        for section in (DrafterConfig, BatchConfig, OptimizerConfig, LossForm):
            name = section.__name__.removesuffix("Config").removesuffix("Form").lower()
            defaults = {field.name: _as_json(field.default) for field in fields(section)}
            decides[name] = {key: value for key, value in decides[name].items() if value != defaults[key]}
        return sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def read_table(path: Path = TABLE) -> dict[str, Any]:
    """The YAML as it stands."""
    table: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return table


def target_directory(table: Mapping[str, Any], target: str) -> Path:
    """Where a target of the table lies."""
    return (HERE / table["targets"][target]["directory"]).resolve()


def entries(table: Mapping[str, Any], *, build: Path = BUILD) -> Iterator[Entry]:
    """All runs, in the table's order; a further seed is an entry of its own, named with it."""
    for name, row in table["drafters"].items():
        target = row.get("target", "qwen3")
        for seed in row.get("seeds", [0]):
            full_name = name if seed == 0 else f"{name}-seed{seed}"
            ids = {"target_layer_ids": table["targets"][target]["target_layer_ids"]}
            values = _laid_over(table["base"], {"drafter": ids})
            values = _laid_over(values, row.get("config", {}))
            values |= {"target": str(target_directory(table, target)), "data": str(build / f"{target}.jsonl")}
            values |= {"out": str(build / "runs" / full_name), "seed": seed}
            snapshots = tuple(row.get("snapshots", ())) if seed == 0 else ()
            config = replace(parse_config(values, base=HERE), save_steps=snapshots)
            yield Entry(name=full_name, what=row["what"], target=target, config=config, snapshots=snapshots)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = _laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
