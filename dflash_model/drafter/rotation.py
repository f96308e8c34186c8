"""Rotation: the RoPE that is really applied. The base has four places and no default; a wrong one ruins every draft silently.

Places: rope_parameters (or below a layer type there), rope_scaling, and the top level. The public trainers build on Qwen3's
rotary embedding, which ignores partial_rotary_factor: such a factor, leaked from the target's config, rotates the whole
head here as it does there, with a warning. `rotary_dim` states the rotated dimensions and ends all doubt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dflash_model.drafter.claims import Claim, Source, flag, number, positive_real, positive_whole, read, settle, wrong
from dflash_model.drafter.spec import ROPE_SCALING
from dflash_model.errors import ConfigError

_LAYER_TYPES = ("full_attention", "sliding_attention")
_TYPE_KEYS = ("rope_type", "type")
_SCALING_KEYS = {name for names in ROPE_SCALING.values() for name in names} | {"mscale", "mscale_all_dim"}
_OTHER_KEYS = {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "rotary_dim", *_TYPE_KEYS}
_TRAINED = "Write what the drafter was trained with; another rotation is another drafter."


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """A rotation without its base; the fields are those of Rope."""

    dims: int
    """Rotated dimensions of each head."""

    type: str = "default"
    """A key of ROPE_SCALING."""

    scaling: tuple[tuple[str, float], ...] = ()
    """Its numbers."""

    sections: tuple[int, ...] | None = None
    """Of a multi-section rotation."""

    interleaved: bool = False
    """Which dimensions form a pair."""


def read_thetas(source: Source) -> list[Claim[float]]:
    """Every statement of the base in `source`, unsettled. Raises ConfigError for one that is no positive number."""
    claims = []
    for group in _groups(source):
        theta = group.value.get("rope_theta")
        if theta is not None:
            claims.append(Claim(value=theta, place=f"{group.place}.rope_theta"))
    claims += source.top("rope_theta")
    return [Claim(value=positive_real(claim), place=claim.place) for claim in claims]


def read_rotation(source: Source, *, head_dim: int) -> Claim[Rotation] | None:
    """Everything but the base; None where `source` says nothing. Raises ConfigError naming what cannot be applied."""
    schemes = [scheme for group in _groups(source) if (scheme := _scheme(group)) is not None]
    scheme = settle("RoPE type", schemes)
    dims = _stated_dims(source, head_dim)
    factor = settle("partial_rotary_factor", _factors(source))
    interleaved = read("pairing of rotated dimensions", _pairing(source), flag)
    sections = _sections(source)
    stated = [claim for claim in (scheme, dims, factor, interleaved, sections) if claim is not None]
    if not stated:
        return None
    kind, scaling = scheme.value if scheme else ("default", ())
    rotated, leaked = _rotated(dims, factor, head_dim, kind=kind)
    kept, dropped = _fitting(sections, rotated, factor, head_dim)
    rotation = Rotation(
        dims=rotated, type=kind, scaling=scaling, sections=kept, interleaved=interleaved.value if interleaved else False
    )
    warning = " ".join(sentence for sentence in (leaked, dropped) if sentence) or None
    return Claim(value=rotation, place=", ".join(claim.place for claim in stated), warning=warning)


def whole_head(head_dim: int) -> Rotation:
    """The plain rotation of all dimensions."""
    return Rotation(dims=head_dim)


def _groups(source: Source) -> Iterator[Claim[Mapping[str, Any]]]:
    used = source.values.get("layer_types") or _LAYER_TYPES[:1]
    for key in ("rope_parameters", "rope_scaling"):
        for claim in source.top(key):
            if not isinstance(claim.value, Mapping):
                raise ConfigError(f"{claim.place} is {claim.value!r}, expected an object.", 'Write {"rope_theta": ...} there.')
            by_type = [name for name in _LAYER_TYPES if isinstance(claim.value.get(name), Mapping)]
            if not by_type:
                yield claim
            for name in by_type:
                if name in used:
                    yield Claim(value=claim.value[name], place=f"{claim.place}.{name}")


Scheme = tuple[str, tuple[tuple[str, float], ...]]


def _scheme(group: Claim[Mapping[str, Any]]) -> Claim[Scheme] | None:
    """Type and numbers of one group; None where it says neither."""
    stated = {key: value for key, value in group.value.items() if value is not None}
    unknown = sorted(set(stated) - _SCALING_KEYS - _OTHER_KEYS)
    if unknown:
        raise ConfigError(f"{group.place} holds {unknown[0]}, which no known rotation has.", _TRAINED)
    named = [Claim(value=_canonical(stated[key], stated), place=f"{group.place}.{key}") for key in _TYPE_KEYS if key in stated]
    kind = settle("RoPE type", named)
    numbers = sorted(_SCALING_KEYS & set(stated))
    if kind is None and numbers:
        raise ConfigError(f"{group.place} holds {numbers[0]} but no rope_type.", _TRAINED)
    if kind is None:
        return None
    if kind.value not in ROPE_SCALING:
        raise ConfigError(
            f"{kind.place} is {kind.value!r}; only {', '.join(ROPE_SCALING)} can be applied exactly.",
            "This drafter cannot be evaluated yet; do not rewrite the key, the drafter would no longer be the trained one.",
        )
    return Claim(value=(kind.value, _numbers(kind, group)), place=kind.place)


def _canonical(kind: Any, group: Mapping[str, Any]) -> Any:
    """ "mrope", an older name beside mrope_section, is the plain rotation with sections."""
    return "default" if kind == "mrope" and "mrope_section" in group else kind


def _numbers(kind: Claim[str], group: Claim[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    """The numbers of the type, with transformers' rules for those of yarn that may be left out."""
    values = dict(_yarn_defaults(group) if kind.value == "yarn" else {})
    for name in sorted(ROPE_SCALING[kind.value], key=lambda name: name != "factor"):
        value = group.value.get(name)
        if value is not None:
            claim = Claim(value=value, place=f"{group.place}.{name}")
            values[name] = float(flag(claim)) if name == "truncate" else positive_real(claim)
        elif name not in values:
            raise ConfigError(f"{kind.place} is {kind.value!r}, but {group.place} gives no {name}.", _TRAINED)
    if kind.value == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ConfigError(
            f"{group.place}.low_freq_factor is {values['low_freq_factor']!r}, but high_freq_factor is {values['high_freq_factor']!r}.",
            "The low one must be smaller; write what the drafter was trained with.",
        )
    return tuple((name, values[name]) for name in ROPE_SCALING[kind.value])


def _yarn_defaults(group: Claim[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """beta_fast 32, beta_slow 1, truncated bounds, and the attention factor of the YaRN paper, as transformers has them."""
    yield from (("beta_fast", 32.0), ("beta_slow", 1.0), ("truncate", 1.0))
    factor = group.value.get("factor")
    if factor is None:
        return
    scale = positive_real(Claim(value=factor, place=f"{group.place}.factor"))
    over, under = (_optional(group, name) for name in ("mscale", "mscale_all_dim"))
    if over and under:
        yield "attention_factor", _magnitude(scale, over) / _magnitude(scale, under)
    else:
        yield "attention_factor", _magnitude(scale, 1.0)


def _optional(group: Claim[Mapping[str, Any]], name: str) -> float | None:
    value = group.value.get(name)
    return None if value is None else number(Claim(value=value, place=f"{group.place}.{name}"))


def _magnitude(scale: float, weight: float) -> float:
    return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0


def _claims(source: Source, key: str) -> list[Claim[Any]]:
    """Every statement of `key`: in the rope groups, then as z-lab's keys stand."""
    inside = [
        Claim(value=group.value[key], place=f"{group.place}.{key}")
        for group in _groups(source)
        if group.value.get(key) is not None
    ]
    return inside + source.claims(key)


def _stated_dims(source: Source, head_dim: int) -> Claim[int] | None:
    dims = read("rotary_dim", _claims(source, "rotary_dim"), positive_whole)
    if dims is not None and (dims.value > head_dim or dims.value % 2):
        raise wrong(dims, f"an even number of at most {head_dim}, the width of a head")
    return dims


def _factors(source: Source) -> list[Claim[float]]:
    claims = [replace(claim, value=positive_real(claim)) for claim in _claims(source, "partial_rotary_factor")]
    for claim in claims:
        if claim.value > 1:
            raise wrong(claim, "a share of at most 1")
    return claims


def _pairing(source: Source) -> list[Claim[bool]]:
    """interleaved or not: is_neox_style says the opposite of rope_interleave."""
    neox = [Claim(value=not flag(claim), place=claim.place) for claim in source.claims("is_neox_style")]
    return neox + source.claims("rope_interleave")


def _sections(source: Source) -> Claim[tuple[int, ...]] | None:
    def whole_list(claim: Claim[Any]) -> tuple[int, ...]:
        if not isinstance(claim.value, Sequence) or isinstance(claim.value, str) or not claim.value:
            raise wrong(claim, "a list of whole numbers")
        return tuple(positive_whole(Claim(value=entry, place=f"{claim.place}[{i}]")) for i, entry in enumerate(claim.value))

    return read("mrope_section", _claims(source, "mrope_section"), whole_list)


def _rotated(dims: Claim[int] | None, factor: Claim[float] | None, head_dim: int, *, kind: str) -> tuple[int, str | None]:
    """How many dimensions are rotated, and a warning where a partial factor is passed over."""
    partial = factor is not None and int(head_dim * factor.value) != head_dim
    if dims is not None:
        return dims.value, None
    if factor is None or not partial:
        return head_dim, None
    if kind != "default":
        raise ConfigError(
            f"{factor.place} is {factor.value!r} with RoPE of type {kind!r}, which no public trainer can run.",
            f'Write "rotary_dim" with the rotated dimensions of each head (at most {head_dim}) that the drafter was trained with.',
        )
    return head_dim, (
        f"{factor.place} is {factor.value!r}, but all {head_dim} dimensions of a head are rotated, as the public trainers do; "
        f'an engine that honours it rotates {int(head_dim * factor.value)}. Write "rotary_dim" to say otherwise.'
    )


def _fitting(
    sections: Claim[tuple[int, ...]] | None, rotated: int, factor: Claim[float] | None, head_dim: int
) -> tuple[tuple[int, ...] | None, str | None]:
    """The sections where they divide the rotated dimensions; none, with a warning, where they fit a factor that is passed over."""
    if sections is None or 2 * sum(sections.value) == rotated:
        return (sections.value if sections else None), None
    if factor is not None and 2 * sum(sections.value) == int(head_dim * factor.value):
        return None, f"{sections.place} {list(sections.value)} is passed over with it; for text it changes nothing."
    raise ConfigError(
        f"{sections.place} is {list(sections.value)}, which makes {2 * sum(sections.value)} dimensions, but {rotated} are rotated.",
        "Half of the rotated dimensions must be the sum of the sections.",
    )
