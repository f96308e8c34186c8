"""How the numbers of a result are written, once for the terminal, Markdown and HTML. What was not measured is a dash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DASH = "–"


def number(value: float | None, places: int = 2) -> str:
    """4.56"""
    return DASH if value is None else f"{value:.{places}f}"


def signed(value: float | None, places: int = 2) -> str:
    """+0.36"""
    return DASH if value is None else f"{value:+.{places}f}"


def interval(ends: Sequence[float] | None) -> str:
    """[4.38, 4.74]; empty where there is none."""
    return "" if ends is None else f"[{ends[0]:.2f}, {ends[1]:.2f}]"


def signed_interval(ends: Sequence[float] | None) -> str:
    """[+0.18, +0.53]; empty where there is none."""
    return "" if ends is None else f"[{ends[0]:+.2f}, {ends[1]:+.2f}]"


def rate(value: float | None) -> str:
    """.87, 1.0 for what rounds to it."""
    if value is None:
        return DASH
    return "1.0" if value >= 0.995 else f"{value:.2f}"[1:]


def percent(value: float | None, places: int = 1) -> str:
    """+8.5%"""
    return DASH if value is None else f"{100 * value:+.{places}f}%"


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRow:
    """One drafter's row of the table, as text."""

    name: str
    """The drafter."""

    tau: str
    """Pooled."""

    tau_interval: str
    """Of `tau`; may be empty."""

    per_request: str
    """Mean over requests."""

    streaks: str
    """top-4 / top-8."""

    trees: str
    """DDTree-16 / -64."""

    survival: tuple[str, ...]
    """One a slot of the widest drafter."""

    difference: str
    """Against the reference."""

    difference_interval: str
    """Of `difference`; may be empty."""

    verdict: str
    """The verdict, or "reference", or a dash where there is no reference."""


def drafter_rows(result: Mapping[str, Any]) -> list[DrafterRow]:
    """One row a drafter, in the result's order."""
    slots = slot_count(result)
    return [_row(drafter, slots) for drafter in result["drafters"]]


def slot_count(result: Mapping[str, Any]) -> int:
    """Slots of the widest drafter."""
    return max(len(drafter["slots"]) for drafter in result["drafters"])


def level_percent(result: Mapping[str, Any]) -> str:
    """95%"""
    return f"{100 * result['settings']['level']:g}%"


def _row(drafter: Mapping[str, Any], slots: int) -> DrafterRow:
    survival = [rate(slot["survival"]) for slot in drafter["slots"]]
    versus = drafter["vs_reference"] or {}
    return DrafterRow(
        name=drafter["name"],
        tau=number(drafter["tau"]["pooled"]),
        tau_interval=interval(drafter["tau"]["interval"]),
        per_request=number(drafter["tau"]["per_request"]),
        streaks=" / ".join(number(drafter["streak"][width]) for width in ("4", "8")),
        trees=" / ".join(number(drafter["ddtree"][budget]) for budget in ("16", "64")),
        survival=(*survival, *[DASH] * (slots - len(survival))),
        difference=signed(versus.get("difference")),
        difference_interval=signed_interval(versus.get("interval")),
        verdict=versus.get("verdict") or ("reference" if drafter["role"] == "reference" else DASH),
    )
