"""Claims: what a foreign config states about one setting, and where it states it, so that a conflict can quote both.

A key counts as absent where its value is null, as in transformers. Numbers in quotes, 1.0 for a whole number and
true for 1 are refused, not converted: a config that was written by hand is the usual cause of a wrong evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from dflash_model.errors import ConfigError

T = TypeVar("T")
NESTED = "dflash_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim(Generic[T]):
    """One statement about one setting."""

    value: T
    """What it says."""

    place: str
    """Who says it: "config.json dflash_config.block_size", "--block-size"."""

    warning: str | None = None
    """A sentence for the run's report where the value needs one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A mapping in z-lab's form: keys at the top level, some of them below dflash_config in newer files."""

    label: str
    """How messages call it: "config.json", "the trainer's saved args"; "config.json part." for what lies below a key."""

    values: Mapping[str, Any]
    """The parsed mapping."""

    @property
    def nested(self) -> Mapping[str, Any]:
        """The dflash_config part; empty where there is none. Raises ConfigError where it is not a mapping."""
        part = self.values.get(NESTED)
        if part is None:
            return {}
        if not isinstance(part, Mapping):
            raise ConfigError(f"{self.place_of(NESTED)} is {part!r}, expected a mapping.", "Write it as an object of keys.")
        return part

    def place_of(self, key: str) -> str:
        """How messages call the key."""
        return self.label + ("" if self.label.endswith(".") else " ") + key

    def top(self, key: str) -> list[Claim[Any]]:
        """The top-level claim of `key`, or none."""
        value = self.values.get(key)
        return [] if value is None else [Claim(value=value, place=self.place_of(key))]

    def claims(self, key: str) -> list[Claim[Any]]:
        """Every claim of `key`: below dflash_config first, then at the top level."""
        value = self.nested.get(key)
        below = [] if value is None else [Claim(value=value, place=self.place_of(f"{NESTED}.{key}"))]
        return below + self.top(key)


def settle(setting: str, claims: Sequence[Claim[T]]) -> Claim[T] | None:
    """The first claim, once all agree; None without claims. Raises ConfigError quoting two that differ."""
    for other in claims[1:]:
        if other.value != claims[0].value:
            raise ConfigError(
                f"{claims[0].place} is {claims[0].value!r}, but {other.place} is {other.value!r}.",
                f"Keep one of them, or write the same {setting} in both.",
            )
    return claims[0] if claims else None


def read(setting: str, claims: Sequence[Claim[Any]], kind: Callable[[Claim[Any]], T]) -> Claim[T] | None:
    """`settle` after `kind` has checked each value. Raises ConfigError for a wrong kind or a conflict."""
    return settle(setting, [Claim(value=kind(claim), place=claim.place, warning=claim.warning) for claim in claims])


def wrong(claim: Claim[Any], expected: str) -> ConfigError:
    """The error for a claim whose value is not what it must be."""
    return ConfigError(f"{claim.place} is {claim.value!r}, expected {expected}.", "Write the value the drafter was trained with.")


def whole_number(claim: Claim[Any]) -> int:
    """A whole number of at least 0. Raises ConfigError."""
    if isinstance(claim.value, bool) or not isinstance(claim.value, int) or claim.value < 0:
        raise wrong(claim, "a whole number of at least 0")
    return claim.value


def block_size(claim: Claim[Any]) -> int:
    """A whole number of at least 2: the anchor and one drafted token. Raises ConfigError."""
    if whole_number(claim) < 2:
        raise wrong(claim, "a whole number of at least 2 (the anchor's row included)")
    return int(claim.value)


def positive_real(claim: Claim[Any]) -> float:
    """A finite number above 0. Raises ConfigError."""
    if isinstance(claim.value, bool) or not isinstance(claim.value, int | float) or not 0 < claim.value < math.inf:
        raise wrong(claim, "a number above 0")
    return float(claim.value)


def number(claim: Claim[Any]) -> float:
    """A finite number. Raises ConfigError."""
    if isinstance(claim.value, bool) or not isinstance(claim.value, int | float) or not -math.inf < claim.value < math.inf:
        raise wrong(claim, "a number")
    return float(claim.value)


def positive_whole(claim: Claim[Any]) -> int:
    """A whole number of at least 1. Raises ConfigError."""
    if whole_number(claim) < 1:
        raise wrong(claim, "a whole number of at least 1")
    return int(claim.value)


def flag(claim: Claim[Any]) -> bool:
    """True or false. Raises ConfigError."""
    if not isinstance(claim.value, bool):
        raise wrong(claim, "true or false")
    return claim.value


def layer_ids(claim: Claim[Any], *, lowest: int = 0) -> tuple[int, ...]:
    """A list of whole numbers from `lowest` on, unique and increasing, as fc reads them. Raises ConfigError.

    Text such as "1,9,17" counts as a list: trainers save their command line's arguments so.
    """
    value = claim.value
    if isinstance(value, str) and (parts := value.replace(",", " ").split()) and all(part.isdecimal() for part in parts):
        value = [int(part) for part in parts]
    if not isinstance(value, list | tuple) or not value:
        raise wrong(claim, "a list of target layer numbers")
    for index, entry in enumerate(value):
        if isinstance(entry, bool) or not isinstance(entry, int) or entry < lowest:
            raise wrong(Claim(value=entry, place=f"{claim.place}[{index}]"), f"a whole number of at least {lowest}")
    ids = tuple(value)
    if any(later <= earlier for earlier, later in pairwise(ids)):
        raise wrong(claim, "unique layer numbers in increasing order")
    return ids
