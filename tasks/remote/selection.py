"""What is taken out of a checkpoint, and the names that follow from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dflash_model.checkpoint.extract import Cast
from dflash_model.digests import json_digest

FORMAT = 1
"""Raised when the same checkpoint and selection would give other bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which tensors of a checkpoint, and as what. JSON-able."""

    state_key: str | None = None
    """Dotted path of the state dict; None: the one of the usual keys."""

    cast: Cast = "keep"
    """ "bf16" halves what float32 weights weigh."""

    keep_vocab: bool = False
    """True: embedding, head and vocabulary maps come along."""

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `Selection(**value)` reads it back."""
        return asdict(self)

    def name_for(self, digest: str) -> str:
        """Names this selection of the checkpoint of that digest, wherever it lies."""
        return json_digest({"format": FORMAT, "digest": digest} | self.to_json())[:24]
