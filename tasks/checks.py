"""Checks that need two artifacts: do these drafters fit this target? Done before anything expensive starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import ConfigError, InputError


def check_drafters(drafters: Sequence[tuple[str, dict[str, Any]]], target: dict[str, Any] | None) -> None:
    """Compare each drafter's facts (name, facts of its checkpoint artifact) with the target's. Raises ConfigError or InputError."""
    if target is None:
        return
    for name, facts in drafters:
        _check_fit(name, DrafterSpec.from_json(facts["spec"]), target)
        theirs, ours = facts.get("tokenizer_sha256"), target.get("tokenizer_sha256")
        if theirs is not None and ours is not None and theirs != ours:
            raise InputError(
                f"Drafter {name} comes with another tokenizer than the target (tokenizer.json {theirs[:12]}.. against {ours[:12]}..).",
                "Evaluate it with the target it was trained for; its token ids mean other words here.",
            )


def _check_fit(name: str, spec: DrafterSpec, target: dict[str, Any]) -> None:
    depth, width, rows = target["num_layers"], target["hidden_size"], target["vocab_size"]
    claims = (
        ("hidden_size", spec.hidden_size, width, "hidden size"),
        ("num_target_layers", spec.num_target_layers, depth, "number of layers"),
        ("vocab_size", spec.vocab_size, rows, "number of embedding rows"),
    )
    for field, ours, theirs, what in claims:
        if ours is not None and ours != theirs:
            raise ConfigError(
                f"Drafter {name} has {field} {ours} ({spec.provenance.get(field, spec.source_format)}), but the target's {what} is {theirs}.",
                "Use the target that this drafter was trained for.",
            )
    if max(spec.tap_indices) > depth:
        raise ConfigError(
            f"Drafter {name} reads target layer {max(spec.tap_indices) - 1}, but the target has layers 0..{depth - 1}.",
            "Correct target_layer_ids, or use the target that this drafter was trained for.",
        )
    if not 0 <= spec.mask_token_id < rows:
        raise ConfigError(
            f"Drafter {name} has mask_token_id {spec.mask_token_id}, outside the target's {rows} embedding rows.",
            "Correct mask_token_id in the drafter's config.",
        )
