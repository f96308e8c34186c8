"""Rotation: the RoPE base that a config states. It has four places and no default; a wrong base ruins every draft silently.

Places: rope_parameters.rope_theta (or below a layer type there), rope_scaling.rope_theta, rope_theta.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_model.drafter.claims import Claim, Source, positive_real
from dflash_model.errors import ConfigError

_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_thetas(source: Source) -> list[Claim[float]]:
    """Every statement of the base in `source`, unsettled.

    Raises ConfigError for a rotation other than the plain one ("yarn", "llama3", ..., or a partial one).
    """
    claims: list[Claim[float]] = []
    for group in _groups(source):
        _refuse_scaled(group)
        _refuse_partial(group)
        theta = group.value.get("rope_theta")
        if theta is not None:
            claim = Claim(value=theta, place=f"{group.place}.rope_theta")
            claims.append(Claim(value=positive_real(claim), place=claim.place))
    for partial in source.top("partial_rotary_factor"):
        _refuse_factor(partial)
    claims += [Claim(value=positive_real(claim), place=claim.place) for claim in source.top("rope_theta")]
    return claims


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


def _refuse_scaled(group: Claim[Mapping[str, Any]]) -> None:
    for key in ("rope_type", "type"):
        kind = group.value.get(key)
        if kind not in (None, "default"):
            raise ConfigError(
                f"{group.place}.{key} is {kind!r}; only the plain rotation ('default') is supported.",
                "This drafter cannot be evaluated yet; do not rewrite the key, the drafter would no longer be the trained one.",
            )


def _refuse_partial(group: Claim[Mapping[str, Any]]) -> None:
    factor = group.value.get("partial_rotary_factor")
    if factor is not None:
        _refuse_factor(Claim(value=factor, place=f"{group.place}.partial_rotary_factor"))


def _refuse_factor(claim: Claim[Any]) -> None:
    if positive_real(claim) != 1.0:
        raise ConfigError(
            f"{claim.place} is {claim.value!r}, but z-lab's drafters rotate the whole head and trainers ignore this key.",
            "Remove it, or write 1.0, if the drafter was trained with whole-head rotation; a partial one is not supported yet.",
        )
