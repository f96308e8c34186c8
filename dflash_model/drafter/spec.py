"""DrafterSpec: the one neutral form of a drafter. Past the readers of foreign configs, nothing else is consulted.

`tap_indices` count like transformers' `output_hidden_states` tuple: index k is the output of 0-based decoder layer
k - 1, index 0 the embedding. A z-lab `target_layer_ids` entry i is tap index i + 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SPEC_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskPolicy:
    """What a query at position a + j (anchor a, slot j) may see in one draft layer."""

    in_block: str
    """"bidirectional" (every slot of the block) or "causal" (slots <= j)."""

    window: int | None = None
    """None: the whole context (positions < a). w: only a window of it, measured from `window_origin`."""

    window_origin: str = "query"
    """"query": key p with (a + j) - p < w (bidirectional: |(a + j) - p| < w, also inside the block).
    "anchor": key p with p >= a - w, the same for all slots."""

    def __post_init__(self) -> None:
        """Refuse values outside the fields' docs (ValueError)."""
        if self.in_block not in ("bidirectional", "causal"):
            raise ValueError(f"in_block {self.in_block!r}")
        if self.window_origin not in ("query", "anchor"):
            raise ValueError(f"window_origin {self.window_origin!r}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The rotation that is really applied (neox / rotate-half layout)."""

    theta: float
    """Base of the rotation frequencies."""

    dims: int
    """How many leading dimensions of each head are rotated; head_dim for full rotation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """Everything that decides a drafter's tokens besides its weights."""

    family: str
    """"dflash"."""

    source_format: str
    """Where the spec was read from: "zlab", "bare", ..."""

    tap_indices: tuple[int, ...]
    """Hidden-state tuple indices, in the order in which fc reads them."""

    block_size: int
    """Rows of one block, the anchor's included."""

    shift: int
    """0: slot k predicts the token at anchor + k, slot 0 is dropped (z-lab). 1: slot k predicts anchor + k + 1."""

    mask_token_id: int
    """Id whose target embedding fills the unknown rows of the block."""

    hidden_size: int
    """Width of the drafter, equal to the target's."""

    intermediate_size: int
    """Inner width of the SwiGLU MLP."""

    num_layers: int
    """Draft depth."""

    num_heads: int
    """Query heads."""

    num_kv_heads: int
    """Key/value heads."""

    head_dim: int
    """Width of one head."""

    rms_norm_eps: float
    """Epsilon of every RMSNorm."""

    attention_bias: bool
    """Whether q, k, v and o projections carry a bias."""

    vocab_size: int | None
    """Vocabulary that the config claims; None where it does not say."""

    num_target_layers: int | None
    """Target depth that the config claims; None where it does not say."""

    rope: Rope
    """The rotation applied to q and k."""

    layer_masks: tuple[MaskPolicy, ...]
    """One policy per draft layer."""

    provenance: dict[str, str] = field(default_factory=dict)
    """Field name -> where its value came from ("config.json block_size", "shape of fc.weight", "--mask-token-id")."""

    @property
    def drafted_tokens(self) -> int:
        """Tokens proposed per block (K in vLLM's terms)."""
        return self.block_size - 1 + self.shift

    @property
    def num_taps(self) -> int:
        """Target layers that feed fc."""
        return len(self.tap_indices)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads back; part of a checkpoint artifact's facts."""
        return {"spec_version": SPEC_VERSION} | asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterSpec:
        """Read `to_json`'s value. Raises ValueError for another version."""
        fields = dict(data)
        if fields.pop("spec_version", None) != SPEC_VERSION:
            raise ValueError(f"drafter spec version {data.get('spec_version')!r}, expected {SPEC_VERSION}")
        fields["rope"] = Rope(**fields["rope"])
        fields["layer_masks"] = tuple(MaskPolicy(**mask) for mask in fields["layer_masks"])
        fields["tap_indices"] = tuple(fields["tap_indices"])
        return cls(**fields)
