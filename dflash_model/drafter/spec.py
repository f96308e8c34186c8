"""DrafterSpec: the one neutral form of a drafter. Past the readers of foreign configs, nothing else is consulted.

`tap_indices` count like transformers' `output_hidden_states` tuple: index k is the output of 0-based decoder layer
k - 1, index 0 the embedding. A z-lab `target_layer_ids` entry i is tap index i + 1.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SPEC_VERSION = 2
_READ_VERSIONS = (1, 2)
"""Version 1 lacks the fields that have defaults here; the defaults are what it meant."""

FAMILIES = ("dflash", "dflash2")
ROPE_SCALING = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "factor", "original_max_position_embeddings", "truncate"),
}
"""Rope type -> the names of its `scaling`, sorted."""


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
    """The rotation that is really applied, with nothing left to a default of the code that applies it."""

    theta: float
    """Base of the rotation frequencies."""

    dims: int
    """How many leading dimensions of each head are rotated; head_dim for full rotation."""

    type: str = "default"
    """How frequencies are scaled, a key of ROPE_SCALING, with transformers' meaning of the name."""

    scaling: tuple[tuple[str, float], ...] = ()
    """The numbers that `type` needs, by ROPE_SCALING's names; truncate is 1.0 or 0.0, and yarn's attention_factor
    multiplies cos and sin alike."""

    sections: tuple[int, ...] | None = None
    """Pairs of dimensions per position axis of a multi-section rotation (sum dims / 2); None for one axis. Positions of
    text are the same on every axis, so it then equals the plain rotation."""

    interleaved: bool = False
    """False: pairs (i, i + dims / 2), neox or rotate-half. True: pairs (2 i, 2 i + 1)."""

    def __post_init__(self) -> None:
        """Refuse values outside the fields' docs (ValueError)."""
        if self.type not in ROPE_SCALING:
            raise ValueError(f"rope type {self.type!r}")
        if tuple(name for name, _ in self.scaling) != ROPE_SCALING[self.type]:
            raise ValueError(f"rope scaling {self.scaling} of type {self.type}")
        if self.dims < 2 or self.dims % 2:
            raise ValueError(f"rope dims {self.dims}")
        if self.sections is not None and (min(self.sections, default=0) < 1 or 2 * sum(self.sections) != self.dims):
            raise ValueError(f"rope sections {self.sections} of {self.dims} dims")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """Everything that decides a drafter's tokens besides its weights."""

    family: str
    """"dflash", or "dflash2" with convolutions inside the block and a candidate selector."""

    source_format: str
    """Where the spec was read from: "zlab", "bare", ..."""

    tap_indices: tuple[int, ...]
    """Hidden-state tuple indices, in the order in which fc reads them."""

    block_size: int
    """Rows of one block, the anchor's included."""

    shift: int
    """0: slot k predicts the token at anchor + k, slot 0 is dropped (z-lab). 1: slot k predicts anchor + k + 1."""

    mask_token_id: int
    """Id whose embedding fills the unknown rows of the block."""

    mask_embedding: bool = False
    """True: the checkpoint's `mask_embedding` [H] stands in for that row."""

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
    """The target's vocabulary as the config claims it; None where it does not say."""

    owns_embedding: bool = False
    """True: the checkpoint's `embed_tokens.weight` [V, H] embeds the block, not the target's."""

    owns_head: bool = False
    """True: the checkpoint's `lm_head.weight` [V or draft_vocab_size, H] is the head, not the target's."""

    draft_vocab_size: int | None = None
    """None: the target's vocabulary. Vd: the head has Vd rows and the checkpoint holds `d2t` [Vd], whole-number offsets;
    row i speaks of the target's id i + d2t[i]."""

    input_embedding_scale: float = 1.0
    """Factor on the block's raw embedding rows (a mask embedding's included)."""

    output_multiplier: float = 1.0
    """Factor on the logits, before the soft cap."""

    final_logit_softcapping: float | None = None
    """c: logits become c * tanh(logits / c); None: they stay."""

    conv_kernel_size: int | None = None
    """dflash2: taps of each convolution inside the block; None without."""

    conv_group_size: int | None = None
    """dflash2: channels that share one dynamic kernel."""

    selector_rank: int | None = None
    """dflash2: width of the candidate selector's codebooks; None without."""

    selector_top_k: int | None = None
    """dflash2: candidates per slot among which the selector chooses."""

    num_target_layers: int | None
    """Target depth that the config claims; None where it does not say."""

    rope: Rope
    """The rotation applied to q and k."""

    layer_masks: tuple[MaskPolicy, ...]
    """One policy per draft layer."""

    provenance: dict[str, str] = field(default_factory=dict)
    """Field name -> where its value came from ("config.json block_size", "shape of fc.weight", "--mask-token-id")."""

    def __post_init__(self) -> None:
        """Refuse fields that contradict each other (ValueError)."""
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r}")
        extras = (self.conv_kernel_size, self.conv_group_size, self.selector_rank, self.selector_top_k)
        if self.family == "dflash2" and None in extras:
            raise ValueError("dflash2 without conv_kernel_size, conv_group_size, selector_rank or selector_top_k")
        if self.family != "dflash2" and any(value is not None for value in extras):
            raise ValueError(f"{self.family} with a convolution or a selector")
        if self.draft_vocab_size is not None and not self.owns_head:
            raise ValueError("draft_vocab_size without a head of its own")
        if self.rope.dims > self.head_dim:
            raise ValueError(f"rope dims {self.rope.dims} of heads {self.head_dim} wide")

    @property
    def drafted_tokens(self) -> int:
        """Tokens proposed per block (K in vLLM's terms)."""
        return self.block_size - 1 + self.shift

    @property
    def conditional(self) -> bool:
        """Whether a slot's token depends on the one drafted before it."""
        return self.selector_rank is not None

    @property
    def num_taps(self) -> int:
        """Target layers that feed fc."""
        return len(self.tap_indices)

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads back; part of a checkpoint artifact's facts."""
        return {"spec_version": SPEC_VERSION} | asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DrafterSpec:
        """Read `to_json`'s value, also one that version 1 wrote. Raises ValueError for another version."""
        fields = dict(data)
        if fields.pop("spec_version", None) not in _READ_VERSIONS:
            raise ValueError(f"drafter spec version {data.get('spec_version')!r}, expected one of {_READ_VERSIONS}")
        fields["rope"] = _rope_from_json(fields["rope"])
        fields["layer_masks"] = tuple(MaskPolicy(**mask) for mask in fields["layer_masks"])
        fields["tap_indices"] = tuple(fields["tap_indices"])
        return cls(**fields)


def _rope_from_json(data: dict[str, Any]) -> Rope:
    scaling = tuple((name, value) for name, value in data.get("scaling", ()))
    sections = data.get("sections")
    return Rope(**data | {"scaling": scaling, "sections": None if sections is None else tuple(sections)})
