"""Building: sizes and settings, checked against each other, into one DrafterSpec with the warnings that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dflash_model.drafter.claims import Claim, Source, flag, whole_number
from dflash_model.drafter.geometry import SHAPE_OF, Geometry
from dflash_model.drafter.parts import EMBEDDING, HEAD, MASK_EMBEDDING
from dflash_model.drafter.settings import Settings, Taps
from dflash_model.drafter.spec import DrafterSpec, Rope
from dflash_model.drafter.vocabulary import settle_vocabulary
from dflash_model.errors import ConfigError

_CONFIG_KEY = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "attention_bias": "attention_bias",
}
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_SPECIAL_TOKENS = {"eos_token_id": "end-of-sequence", "bos_token_id": "beginning-of-sequence", "pad_token_id": "padding"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a checkpoint turned out to be."""

    spec: DrafterSpec
    """The neutral form."""

    warnings: tuple[str, ...]
    """Sentences that belong into every report on it: what was assumed, and what looks wrong without being certain."""


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


def build(
    geometry: Geometry,
    settings: Settings,
    *,
    source_format: str,
    provenance: Mapping[str, str],
    taps: Taps | None = None,
    architecture: Claim[str] | None = None,
    special_tokens: Source | None = None,
) -> Reading:
    """The spec of these sizes and settings; `provenance` covers the sizes, the settings add theirs.

    `special_tokens` may state eos, bos and pad ids, to warn of a mask id that is one of them. block_size, mask_token_id,
    tap_indices, rope_theta and rms_norm_eps must be there (ValueError). Raises ConfigError where settings contradict the
    weights or each other.
    """
    found = settings.or_from(Settings.unstated(geometry))
    if not (found.block_size and found.mask_token_id and found.tap_indices and found.rope_theta and found.rms_norm_eps):
        raise ValueError("build needs every required setting")
    assert found.shift is not None
    assert found.layer_masks is not None
    assert found.rotation is not None
    _check_taps(found.tap_indices, geometry.num_taps, found.num_target_layers, taps or Taps())
    vocabulary = settle_vocabulary(geometry.parts, found.vocab_size, found.draft_vocab_size)
    _check_mask_id(found.mask_token_id, vocabulary.vocab_size)
    family, sizes = _family(geometry, found, architecture)
    parts, turn = geometry.parts, found.rotation.value
    numbers: dict[str, Any] = {name: claim.value for name, claim in sizes.items()}
    spec = DrafterSpec(
        family=family,
        source_format=source_format,
        tap_indices=found.tap_indices.value,
        block_size=found.block_size.value,
        shift=found.shift.value,
        mask_token_id=found.mask_token_id.value,
        mask_embedding=parts.mask_embedding,
        **{name: getattr(geometry, name) for name in _CONFIG_KEY},
        rms_norm_eps=found.rms_norm_eps.value,
        vocab_size=vocabulary.vocab_size.value if vocabulary.vocab_size else None,
        owns_embedding=parts.embedding_rows is not None,
        owns_head=parts.head_rows is not None,
        draft_vocab_size=vocabulary.draft_vocab_size.value if vocabulary.draft_vocab_size else None,
        input_embedding_scale=found.input_embedding_scale.value if found.input_embedding_scale else 1.0,
        output_multiplier=found.output_multiplier.value if found.output_multiplier else 1.0,
        final_logit_softcapping=found.final_logit_softcapping.value if found.final_logit_softcapping else None,
        **numbers,
        num_target_layers=found.num_target_layers.value if found.num_target_layers else None,
        rope=Rope(theta=found.rope_theta.value, **{f.name: getattr(turn, f.name) for f in fields(turn)}),
        layer_masks=found.layer_masks.value,
        provenance=_provenance(found, geometry, provenance, sizes)
        | {name: claim.place for name in ("vocab_size", "draft_vocab_size") if (claim := getattr(vocabulary, name))},
    )
    claims = [claim for f in fields(found) if (claim := getattr(found, f.name)) is not None]
    warnings = [claim.warning for claim in claims if claim.warning]
    return Reading(spec=spec, warnings=(*warnings, *_special_mask_ids(found.mask_token_id, special_tokens)))


def _provenance(
    found: Settings, geometry: Geometry, sizes_from: Mapping[str, str], dflash2: Mapping[str, Claim[int]]
) -> dict[str, str]:
    places = {f.name: claim.place for f in fields(found) if (claim := getattr(found, f.name)) is not None}
    places["rope"] = f"{places.pop('rope_theta')}; {places.pop('rotation')}"
    places = {name: place for name, place in places.items() if name not in _DFLASH2}
    parts = geometry.parts
    tensors = {
        "owns_embedding": (EMBEDDING, parts.embedding_rows is not None),
        "owns_head": (HEAD, parts.head_rows is not None),
        "mask_embedding": (MASK_EMBEDDING, parts.mask_embedding),
    }
    return (
        {f.name: "not stated" for f in fields(DrafterSpec) if f.name != "provenance"}
        | {"family": "tensor names", "source_format": "how the checkpoint was given"}
        | {name: f"{tensor} is {'there' if there else 'not there'}" for name, (tensor, there) in tensors.items()}
        | dict(sizes_from)
        | places
        | {name: claim.place for name, claim in dflash2.items()}
    )


def _family(geometry: Geometry, found: Settings, architecture: Claim[str] | None) -> tuple[str, dict[str, Claim[int]]]:
    """The family by its tensors, and DFlash2's sizes. Raises ConfigError where the config says otherwise."""
    parts, stated = geometry.parts, {name: getattr(found, name) for name in _DFLASH2}
    if architecture is not None and ("DFlash2" in architecture.value) != parts.is_dflash2:
        holds = "hold" if parts.is_dflash2 else "hold no"
        raise ConfigError(
            f"{architecture.place} names {architecture.value}, but the weights {holds} convolutions and candidate selector.",
            "Take config and weights from the same checkpoint.",
        )
    if not parts.is_dflash2:
        for claim in stated.values():
            if claim is not None:
                raise ConfigError(
                    f"{claim.place} is {claim.value!r}, but the weights hold no convolutions and candidate selector.",
                    "This is a DFlash2 config; take config and weights from the same checkpoint.",
                )
        return "dflash", {}
    sizes: dict[str, Claim[int]] = {}
    for name, claim in stated.items():
        shown = getattr(parts, name, None)
        if claim is None and shown is None:
            raise ConfigError(
                f"The drafter is DFlash2, but nothing states {name}.",
                f"Write the {name} that the drafter was trained with below dflash_config; weights do not show it.",
            )
        if claim is not None and shown is not None and claim.value != shown:
            raise ConfigError(
                f"{claim.place} is {claim.value!r}, but the weights show {shown!r}.",
                "Config and weights belong to different drafters; take both from the same checkpoint.",
            )
        sizes[name] = claim or Claim(value=shown, place="shapes of the DFlash2 tensors")
    _check_top_k(sizes["selector_top_k"], parts.selector_rows)
    return "dflash2", sizes


def _check_top_k(top_k: Claim[int], rows: int | None) -> None:
    if rows is not None and top_k.value > rows:
        raise ConfigError(
            f"{top_k.place} is {top_k.value}, but the codebooks know {rows} tokens.",
            "Write the number the drafter was trained with.",
        )


def _check_taps(taps: Claim[tuple[int, ...]], num_taps: int, depth: Claim[int] | None, numbering: Taps) -> None:
    ids = [index - numbering.offset for index in taps.value]
    if len(ids) != num_taps:
        raise ConfigError(
            f"{taps.place} is {ids}, {len(ids)} layers, but fc.weight reads {num_taps} times the hidden size.",
            "Give the target layers that the drafter was trained on, in order.",
        )
    if depth is not None and taps.value[-1] > depth.value:
        raise ConfigError(
            f"{taps.place} is {ids}, but {depth.place} is {depth.value}: {_range(depth.value, numbering)}.",
            "z-lab's numbers mean the output of 0-based layer i; speculators' and vLLM's are one higher.",
        )


def _range(depth: int, numbering: Taps) -> str:
    return f"layers count from 0 to {depth - 1}" if numbering.offset else f"indices count from 0 to {depth}"


def _check_mask_id(mask: Claim[int], vocabulary: Claim[int] | None) -> None:
    if vocabulary is not None and mask.value >= vocabulary.value:
        raise ConfigError(
            f"{mask.place} is {mask.value}, but {vocabulary.place} is {vocabulary.value}: that id has no embedding row.",
            "Give the mask id that the drafter was trained with.",
        )


def _special_mask_ids(mask: Claim[int], source: Source | None) -> list[str]:
    """A warning for each special token whose id is the mask's."""
    warnings = []
    for key, what in _SPECIAL_TOKENS.items():
        for claim in source.top(key) if source else []:
            ids = claim.value if isinstance(claim.value, list | tuple) else [claim.value]
            if mask.value in ids:
                warnings.append(
                    f"{mask.place} is {mask.value}, which {claim.place} calls the {what} token: check that the drafter was trained so."
                )
    return warnings
