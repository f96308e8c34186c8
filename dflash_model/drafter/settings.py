"""Settings: what weights cannot show (block size, mask id, taps, rotation, masks), gathered from every source that states it.

Sources that state the same setting must agree: a drafter evaluated under a wrong one scores low without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dflash_model.drafter.claims import Claim, Source, block_size, flag, layer_ids, positive_real, read, settle, whole_number
from dflash_model.drafter.geometry import SHAPE_OF, Geometry
from dflash_model.drafter.policies import LayerMasks, read_layer_masks, whole_context
from dflash_model.drafter.rotation import read_thetas
from dflash_model.drafter.spec import DrafterSpec, Rope
from dflash_model.errors import ConfigError

T = TypeVar("T")

_SHIFT_KEYS = ("sample_from_anchor", "query_zero_predicts_next", "shift_label")
_CONFIG_KEY = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "attention_bias": "attention_bias",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the sources state; None where none does."""

    block_size: Claim[int] | None
    """Rows of a block."""

    mask_token_id: Claim[int] | None
    """Id of the mask token."""

    tap_indices: Claim[tuple[int, ...]] | None
    """Hidden-state tuple indices: the stated layer ids plus one."""

    rope_theta: Claim[float] | None
    """Base of the rotation."""

    rms_norm_eps: Claim[float] | None
    """Epsilon of the norms."""

    shift: Claim[int] | None
    """0 or 1, as in DrafterSpec."""

    vocab_size: Claim[int] | None
    """Vocabulary of the target."""

    num_target_layers: Claim[int] | None
    """Depth of the target."""

    layer_masks: Claim[LayerMasks] | None
    """One policy per draft layer."""

    @classmethod
    def unstated(cls, *, num_layers: int) -> Settings:
        """What z-lab's form means where it says nothing: slot 0 is dropped, every layer sees everything."""
        nothing = dict.fromkeys(f.name for f in fields(cls))
        shift = Claim(value=0, place="not stated: z-lab's layout, slot 0 is dropped")
        masks = Claim(value=whole_context(num_layers), place="not stated: full attention, bidirectional in the block")
        return cls(**nothing | {"shift": shift, "layer_masks": masks})

    def or_from(self, other: Settings) -> Settings:
        """These settings, with `other`'s where nothing is stated."""
        return Settings(**{f.name: getattr(self, f.name) or getattr(other, f.name) for f in fields(self)})


def read_settings(sources: Sequence[Source], *, num_layers: int, options: Mapping[str, Any] | None = None) -> Settings:
    """Gather every setting from command-line `options` (key -> value, None = not given), then from `sources` in order.

    Raises ConfigError for a value of a wrong kind and for two statements that differ, quoting both.
    """
    given = {key: value for key, value in (options or {}).items() if value is not None}

    def claims(key: str) -> list[Claim[Any]]:
        option = [Claim(value=given[key], place="--" + key.replace("_", "-"))] if key in given else []
        return option + [claim for source in sources for claim in source.claims(key)]

    def setting(key: str, kind: Callable[[Claim[Any]], T]) -> Claim[T] | None:
        return read(key, claims(key), kind)

    ids = setting("target_layer_ids", layer_ids)
    thetas = [theta for source in sources for theta in read_thetas(source)]
    if "rope_theta" in given:
        option = Claim(value=given["rope_theta"], place="--rope-theta")
        thetas.insert(0, Claim(value=positive_real(option), place=option.place))
    layout = read("slot layout", [claim for key in _SHIFT_KEYS for claim in claims(key)], flag)
    masks = [mask for source in sources if (mask := read_layer_masks(source, num_layers=num_layers))]
    return Settings(
        block_size=setting("block_size", block_size),
        mask_token_id=setting("mask_token_id", whole_number),
        tap_indices=Claim(value=tuple(entry + 1 for entry in ids.value), place=ids.place) if ids else None,
        rope_theta=settle("rope_theta", thetas),
        rms_norm_eps=setting("rms_norm_eps", positive_real),
        shift=Claim(value=int(layout.value), place=layout.place) if layout else None,
        vocab_size=setting("vocab_size", whole_number),
        num_target_layers=setting("num_target_layers", whole_number),
        layer_masks=settle("attention masks", masks),
    )


def check_geometry(geometry: Geometry, source: Source | None) -> dict[str, str]:
    """Compare the sizes that `source` (if any) states with the weights'. Returns field -> where its value came from.

    Raises ConfigError quoting a size that differs.
    """
    provenance = {name: f"shape of {tensor}" for name, tensor in SHAPE_OF.items() if name != "num_taps"}
    for name, key in _CONFIG_KEY.items():
        actual: int = getattr(geometry, name)
        for claim in source.top(key) if source else []:
            stated = flag(claim) if name == "attention_bias" else whole_number(claim)
            if stated != actual:
                raise ConfigError(
                    f"{claim.place} is {claim.value!r}, but {SHAPE_OF[name]} in the weights shows {actual!r}.",
                    "Config and weights belong to different drafters; take both from the same checkpoint.",
                )
            provenance[name] = claim.place
    return provenance


def build_spec(geometry: Geometry, settings: Settings, *, source_format: str, provenance: Mapping[str, str]) -> DrafterSpec:
    """The spec of these sizes and settings; `provenance` covers the sizes, the settings add theirs.

    block_size, mask_token_id, tap_indices, rope_theta and rms_norm_eps must be there (ValueError). Raises ConfigError
    where settings contradict the weights or each other.
    """
    found = settings.or_from(Settings.unstated(num_layers=geometry.num_layers))
    if not (found.block_size and found.mask_token_id and found.tap_indices and found.rope_theta and found.rms_norm_eps):
        raise ValueError("build_spec needs every required setting")
    _check_taps(found.tap_indices, geometry.num_taps, found.num_target_layers)
    _check_mask_id(found.mask_token_id, found.vocab_size)
    assert found.shift is not None
    assert found.layer_masks is not None
    places = {f.name: claim.place for f in fields(found) if (claim := getattr(found, f.name)) is not None}
    places["rope"] = f"{places.pop('rope_theta')}; whole-head rotation"
    return DrafterSpec(
        family="dflash",
        source_format=source_format,
        tap_indices=found.tap_indices.value,
        block_size=found.block_size.value,
        shift=found.shift.value,
        mask_token_id=found.mask_token_id.value,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        num_layers=geometry.num_layers,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        rms_norm_eps=found.rms_norm_eps.value,
        attention_bias=geometry.attention_bias,
        vocab_size=found.vocab_size.value if found.vocab_size else None,
        num_target_layers=found.num_target_layers.value if found.num_target_layers else None,
        rope=Rope(theta=found.rope_theta.value, dims=geometry.head_dim),
        layer_masks=found.layer_masks.value,
        provenance={f.name: "not stated" for f in fields(DrafterSpec) if f.name != "provenance"}
        | {"family": "tensor names", "source_format": "how the checkpoint was given"}
        | dict(provenance)
        | places,
    )


def _check_taps(taps: Claim[tuple[int, ...]], num_taps: int, depth: Claim[int] | None) -> None:
    ids = [index - 1 for index in taps.value]
    if len(ids) != num_taps:
        raise ConfigError(
            f"{taps.place} is {ids}, {len(ids)} layers, but fc.weight reads {num_taps} times the hidden size.",
            "Give the target layers that the drafter was trained on, in order.",
        )
    if depth is not None and ids[-1] >= depth.value:
        raise ConfigError(
            f"{taps.place} is {ids}, but {depth.place} is {depth.value}: layers count from 0 to {depth.value - 1}.",
            "Give z-lab's numbers (output of 0-based layer i); speculators' and vLLM's are one higher.",
        )


def _check_mask_id(mask: Claim[int], vocabulary: Claim[int] | None) -> None:
    if vocabulary is not None and mask.value >= vocabulary.value:
        raise ConfigError(
            f"{mask.place} is {mask.value}, but {vocabulary.place} is {vocabulary.value}: that id has no embedding row.",
            "Give the mask id that the drafter was trained with.",
        )
