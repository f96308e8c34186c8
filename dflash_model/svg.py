"""A small SVG canvas and linear axes. Colours are CSS classes that the page defines; every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH = 640
"""Canvas units across, whatever the height; the page scales it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A linear scale from values to canvas units."""

    low: float
    """Value at `start`."""

    high: float
    """Value at `end`."""

    start: float
    """Canvas units."""

    end: float
    """Canvas units."""

    def __call__(self, value: float) -> float:
        """Where `value` lies."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values within the axis."""
        step = round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def round_step(wanted: float) -> float:
    """The 1, 2 or 5 times a power of ten that is not below `wanted`."""
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted * (1 - 1e-9))


def axis_around(values: Sequence[float], *, start: float, end: float) -> Axis:
    """An axis that holds all values with a little room; equal values get a unit of room."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.5
    return Axis(low=low - room, high=high + room, start=start, end=end)


@dataclass(slots=True)
class Canvas:
    """SVG elements in the making; every text is escaped."""

    height: float
    """Canvas units."""

    label: str
    """What a screen reader says."""

    parts: list[str] = field(default_factory=list)
    """Elements so far."""

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        self.parts.append(f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def path(self, points: Sequence[tuple[float, float]], css: str) -> None:
        """An open polyline."""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="{css}" points="{joined}"/>')

    def rect(self, x: float, y: float, width: float, height: float, css: str, title: str = "") -> None:
        """A rectangle; `title` is shown on hover."""
        self._titled(
            f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"', "rect", title
        )

    def dot(self, x: float, y: float, css: str, title: str = "", radius: float = 4.5) -> None:
        """A filled circle; `title` is shown on hover."""
        self._titled(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"', "circle", title)

    def text(self, x: float, y: float, content: str, css: str = "", anchor: str = "start") -> None:
        """One line of text, centred on `y`."""
        self.parts.append(
            f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central">{escape(content)}</text>'
        )

    def _titled(self, opening: str, tag: str, title: str) -> None:
        self.parts.append(f"{opening}><title>{escape(title)}</title></{tag}>" if title else f"{opening}/>")

    def markup(self) -> Markup:
        """The finished SVG element."""
        body = "".join(self.parts)
        return Markup(f'<svg viewBox="0 0 {WIDTH} {self.height:.0f}" role="img" aria-label="{escape(self.label)}">{body}</svg>')
