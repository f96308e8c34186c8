"""Settings: what weights cannot show (block size, mask id, taps, rotation, masks), gathered from every source that states it.

Sources that state the same setting must agree: a drafter evaluated under a wrong one scores low without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

from dflash_model.drafter.claims import (
    Claim,
    Source,
    block_size,
    flag,
    layer_ids,
    number,
    positive_real,
    positive_whole,
    read,
    settle,
    whole_number,
    wrong,
)
from dflash_model.drafter.geometry import Geometry
from dflash_model.drafter.policies import LayerMasks, read_layer_masks, whole_context
from dflash_model.drafter.rotation import Rotation, read_rotation, read_thetas, whole_head

T = TypeVar("T")

_SHIFT_KEYS = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
READ_KEYS = frozenset(_SHIFT_KEYS) | {
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "vocab_size", "draft_vocab_size", "rms_norm_eps",
    "causal", "use_swa", "swa_window_size", "rotary_dim", "partial_rotary_factor", "mrope_section", "is_neox_style",
    "rope_interleave", "input_embedding_scale", "output_multiplier", "final_logit_softcapping", "conv_kernel_size",
    "conv_group_size", "selector_rank", "selector_top_k",
}  # fmt: skip
"""Keys that are read below dflash_config; any other one there is reported as unread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the sources state; None where none does."""

    block_size: Claim[int] | None
    """Rows of a block."""

    mask_token_id: Claim[int] | None
    """Id of the mask token."""

    tap_indices: Claim[tuple[int, ...]] | None
    """Hidden-state tuple indices."""

    rope_theta: Claim[float] | None
    """Base of the rotation."""

    rotation: Claim[Rotation] | None
    """The rest of it."""

    rms_norm_eps: Claim[float] | None
    """Epsilon of the norms."""

    shift: Claim[int] | None
    """0 or 1, as in DrafterSpec."""

    vocab_size: Claim[int] | None
    """Vocabulary of the target."""

    draft_vocab_size: Claim[int] | None
    """Vocabulary of the drafter's head."""

    num_target_layers: Claim[int] | None
    """Depth of the target."""

    layer_masks: Claim[LayerMasks] | None
    """One policy per draft layer."""

    input_embedding_scale: Claim[float] | None
    """Factor on the block's embedding rows."""

    output_multiplier: Claim[float] | None
    """Factor on the logits."""

    final_logit_softcapping: Claim[float | None] | None
    """Soft cap of the logits; a claim of None (0 in configs) says that there is none."""

    conv_kernel_size: Claim[int] | None
    """DFlash2."""

    conv_group_size: Claim[int] | None
    """DFlash2."""

    selector_rank: Claim[int] | None
    """DFlash2."""

    selector_top_k: Claim[int] | None
    """DFlash2; the one of the four that weights do not show."""

    @classmethod
    def unstated(cls, geometry: Geometry) -> Settings:
        """What z-lab's form means where it says nothing: slot 0 is dropped, every layer sees everything, the whole head turns."""
        nothing = dict.fromkeys(f.name for f in fields(cls))
        shift = Claim(value=0, place="not stated: z-lab's layout, slot 0 is dropped")
        masks = Claim(value=whole_context(geometry.num_layers), place="not stated: full attention, bidirectional in the block")
        rotation = Claim(value=whole_head(geometry.head_dim), place="whole-head rotation")
        return cls(**nothing | {"shift": shift, "layer_masks": masks, "rotation": rotation})

    def or_from(self, other: Settings) -> Settings:
        """These settings, with `other`'s where nothing is stated."""
        return Settings(**{f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Taps:
    """How a form numbers the layers whose hidden states feed fc."""

    key: str = "target_layer_ids"
    """Where the list stands."""

    offset: int = 1
    """What is added to an entry to make a tuple index: 1 where entry i is the output of 0-based layer i."""

    lowest: int = 0
    """The smallest entry: -1 where that is the embedding's output."""


def read_settings(
    sources: Sequence[Source], geometry: Geometry, *, options: Mapping[str, Any] | None = None, taps: Taps | None = None
) -> Settings:
    """Gather every setting from command-line `options` (key -> value, None = not given), then from `sources` in order.

    Raises ConfigError for a value of a wrong kind and for two statements that differ, quoting both.
    """
    given = {key: value for key, value in (options or {}).items() if value is not None}
    numbering = taps or Taps()

    def claims(key: str) -> list[Claim[Any]]:
        option = [Claim(value=given[key], place="--" + key.replace("_", "-"))] if key in given else []
        return option + [claim for source in sources for claim in source.claims(key)]

    def setting(key: str, kind: Callable[[Claim[Any]], T]) -> Claim[T] | None:
        return read(key, claims(key), kind)

    ids = setting(numbering.key, partial(layer_ids, lowest=numbering.lowest))
    thetas = [theta for source in sources for theta in read_thetas(source)]
    if "rope_theta" in given:
        option = Claim(value=given["rope_theta"], place="--rope-theta")
        thetas.insert(0, Claim(value=positive_real(option), place=option.place))
    layout = read("slot layout", [claim for key in _SHIFT_KEYS for claim in claims(key)], flag)
    masks = [mask for source in sources if (mask := read_layer_masks(source, num_layers=geometry.num_layers))]
    rotations = [one for source in sources if (one := read_rotation(source, head_dim=geometry.head_dim))]
    return Settings(
        block_size=setting("block_size", block_size),
        mask_token_id=setting("mask_token_id", whole_number),
        tap_indices=Claim(value=tuple(entry + numbering.offset for entry in ids.value), place=ids.place) if ids else None,
        rope_theta=settle("rope_theta", thetas),
        rotation=settle("rotation", rotations),
        rms_norm_eps=setting("rms_norm_eps", positive_real),
        shift=Claim(value=int(layout.value), place=layout.place) if layout else None,
        vocab_size=setting("vocab_size", positive_whole),
        draft_vocab_size=setting("draft_vocab_size", positive_whole),
        num_target_layers=setting("num_target_layers", positive_whole),
        layer_masks=settle("attention masks", masks),
        input_embedding_scale=setting("input_embedding_scale", positive_real),
        output_multiplier=setting("output_multiplier", _factor),
        final_logit_softcapping=setting("final_logit_softcapping", _soft_cap),
        conv_kernel_size=setting("conv_kernel_size", positive_whole),
        conv_group_size=setting("conv_group_size", positive_whole),
        selector_rank=setting("selector_rank", positive_whole),
        selector_top_k=setting("selector_top_k", positive_whole),
    )


def _factor(claim: Claim[Any]) -> float:
    if number(claim) == 0:
        raise wrong(claim, "a number other than 0")
    return float(claim.value)


def _soft_cap(claim: Claim[Any]) -> float | None:
    """0 switches it off, as in PyPI dflash."""
    if number(claim) < 0:
        raise wrong(claim, "a number of at least 0")
    return float(claim.value) or None
