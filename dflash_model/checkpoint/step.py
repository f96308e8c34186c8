"""The training step that a checkpoint's plain data tell."""

from __future__ import annotations

from typing import Any


def step_of(plain: Any) -> int | None:
    """`step`, else `global_step`, of the data beside the tensors; None where there is no whole number."""
    step = plain.get("step", plain.get("global_step")) if isinstance(plain, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None
