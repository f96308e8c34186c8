"""The charts of a report as inline SVG: no script, no font, no request.

Series class `c0`, `c1`, .. for candidates, `ref` for the reference. A chart function gives "" where there is nothing to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from dflash_model.figures import interval, number, percent, signed, signed_interval
from dflash_model.svg import Axis, Canvas, axis_around

COLOURS = 6
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 590, 14, 290
_NAME_LENGTH = 15


def series_classes(result: Mapping[str, Any]) -> dict[str, str]:
    """Drafter name -> CSS class of its colour."""
    classes, used = {}, 0
    for drafter in result["drafters"]:
        if drafter["role"] == "reference":
            classes[drafter["name"]] = "ref"
        else:
            classes[drafter["name"]] = f"c{used % COLOURS}"
            used += 1
    return classes


def survival_chart(result: Mapping[str, Any]) -> Markup:
    """P(accepted drafts >= slot) for all drafters, with each line's last value at its end."""
    drawn = [drafter for drafter in result["drafters"] if any(slot["survival"] is not None for slot in drafter["slots"])]
    if not drawn:
        return Markup()
    canvas = Canvas(height=330, label="Survival per slot")
    slots = max(len(drafter["slots"]) for drafter in drawn)
    across = Axis(low=1, high=max(slots, 2), start=_LEFT, end=_RIGHT)
    up = Axis(low=0, high=1, start=_BOTTOM, end=_TOP)
    for tick in up.ticks():
        canvas.line(_LEFT, up(tick), _RIGHT, up(tick), "grid")
        canvas.text(_LEFT - 8, up(tick), f"{tick:.1f}", "tick", "end")
    for slot in range(1, slots + 1):
        canvas.text(across(slot), _BOTTOM + 16, str(slot), "tick", "middle")
    canvas.text((_LEFT + _RIGHT) / 2, _BOTTOM + 33, "slot", "tick", "middle")
    classes = series_classes(result)
    ends: list[tuple[float, str, str]] = []
    for drafter in sorted(drawn, key=lambda one: one["role"] != "reference"):
        css, name = classes[drafter["name"]], drafter["name"]
        known = [(slot["slot"], slot["survival"]) for slot in drafter["slots"] if slot["survival"] is not None]
        canvas.path([(across(slot), up(value)) for slot, value in known], f"series {css}")
        for slot, value in known:
            canvas.dot(across(slot), up(value), f"fill {css}", f"{name}: slot {slot}, {value:.3f}", 4)
        ends.append((up(known[-1][1]), f"{known[-1][1]:.2f}", css))
    for y, label, css in apart(ends, gap=14):
        canvas.text(_RIGHT + 9, y, label, f"value {css}")
    return canvas.markup()


def apart(labels: Sequence[tuple[float, str, str]], *, gap: float) -> list[tuple[float, str, str]]:
    """(y, text, class) moved up where they would overlap, the lowest first."""
    placed: list[tuple[float, str, str]] = []
    for y, text, css in sorted(labels, reverse=True):
        placed.append((min(y, placed[-1][0] - gap) if placed else y, text, css))
    return placed


def slot_effect_chart(result: Mapping[str, Any]) -> Markup:
    """Bars: tokens per step won or lost at each slot against the reference, a group a slot."""
    drawn = [d for d in result["drafters"] if d["vs_reference"] and any(e is not None for e in d["vs_reference"]["slot_effects"])]
    if not drawn:
        return Markup()
    canvas = Canvas(height=330, label="Where each candidate parts from the reference, by slot")
    effects = {drafter["name"]: drafter["vs_reference"]["slot_effects"] for drafter in drawn}
    values = [effect for row in effects.values() for effect in row if effect is not None]
    slots = max(len(row) for row in effects.values())
    up = axis_around([0.0, *values], start=_BOTTOM, end=_TOP)
    width = (_RIGHT - _LEFT) / slots
    bar = min(26.0, 0.74 * width / len(drawn))
    for tick in up.ticks():
        canvas.line(_LEFT, up(tick), _RIGHT, up(tick), "grid")
        canvas.text(_LEFT - 8, up(tick), "0" if abs(tick) < 1e-12 else f"{tick:+.2g}", "tick", "end")
    classes = series_classes(result)
    for index in range(slots):
        centre = _LEFT + (index + 0.5) * width
        canvas.text(centre, _BOTTOM + 16, str(index + 1), "tick", "middle")
        for position, (name, row) in enumerate(effects.items()):
            effect = row[index] if index < len(row) else None
            if effect is None:
                continue
            left = centre + (position - len(effects) / 2) * bar
            top, bottom = sorted((up(effect), up(0)))
            canvas.rect(
                left + 1, top, bar - 2, max(bottom - top, 1), f"fill {classes[name]}", f"{name}: slot {index + 1}, {effect:+.3f}"
            )
    canvas.line(_LEFT, up(0), _RIGHT, up(0), "axis")
    canvas.text((_LEFT + _RIGHT) / 2, _BOTTOM + 33, "slot", "tick", "middle")
    return canvas.markup()


def forest_plot(result: Mapping[str, Any]) -> Markup:
    """Each candidate's difference with its interval, pooled above per request, over the band that counts as equal."""
    drawn = [d for d in result["drafters"] if d["vs_reference"] and d["vs_reference"]["difference"] is not None]
    if not drawn:
        return Markup()
    row = 56
    bottom = 16 + row * len(drawn)
    canvas = Canvas(height=bottom + 26, label="Difference from the reference")
    margin = drawn[0]["vs_reference"]["equal_within"]
    across = _difference_axis([d["vs_reference"] for d in drawn], margin)
    canvas.rect(across(-margin), 8, across(margin) - across(-margin), bottom - 8, "band", f"counts as equal: ±{margin:.2f}")
    _grid(canvas, across, bottom, signs=True)
    canvas.line(across(0), 8, across(0), bottom, "axis")
    classes = series_classes(result)
    for index, drafter in enumerate(drawn):
        versus, css, y = drafter["vs_reference"], classes[drafter["name"]], 30 + row * index
        canvas.text(0, y, shortened(drafter["name"]), f"name {css}")
        canvas.text(0, y + 19, f"{signed(versus['difference'])} ({percent(versus['relative_difference'])})", "tick")
        pooled = f"pooled {signed(versus['difference'])} {signed_interval(versus['interval'])}"
        _whisker(canvas, across, y, value=versus["difference"], ends=versus["interval"], css=css, title=pooled)
        value, ends = versus["per_request_difference"], versus["per_request_interval"]
        each = f"mean over requests {signed(value)} {signed_interval(ends)}"
        _whisker(canvas, across, y + 19, value=value, ends=ends, css=f"{css} faint", title=each)
    return canvas.markup()


def category_chart(result: Mapping[str, Any]) -> Markup:
    """tau by category with intervals, a row a drafter in each category."""
    names = sorted({name for drafter in result["drafters"] for name in drafter["categories"]})
    cells = [drafter["categories"][name] for drafter in result["drafters"] for name in names if name in drafter["categories"]]
    values = [value for cell in cells if cell["tau"] is not None for value in (cell["tau"], *(cell["interval"] or ()))]
    if not values:
        return Markup()
    line, gap = 15, 18
    row = line * len(result["drafters"]) + gap
    bottom = 10 + row * len(names)
    canvas = Canvas(height=bottom + 26, label="tau by category")
    across = axis_around(values, start=150, end=_RIGHT)
    _grid(canvas, across, bottom, signs=False)
    classes = series_classes(result)
    for index, name in enumerate(names):
        top = 10 + row * index
        prompts = max(drafter["categories"].get(name, {"prompts": 0})["prompts"] for drafter in result["drafters"])
        canvas.text(0, top + gap / 2 + 8, shortened(name), "name")
        canvas.text(0, top + gap / 2 + 26, f"{prompts} prompts", "tick")
        for position, drafter in enumerate(result["drafters"]):
            cell = drafter["categories"].get(name)
            if cell is None or cell["tau"] is None:
                continue
            y = top + gap / 2 + line * (position + 0.5)
            title = f"{drafter['name']}, {name}: {number(cell['tau'])} {interval(cell['interval'])}"
            _whisker(canvas, across, y, value=cell["tau"], ends=cell["interval"], css=classes[drafter["name"]], title=title)
            canvas.text(_RIGHT + 9, y, number(cell["tau"]), f"value {classes[drafter['name']]}")
    return canvas.markup()


def shortened(name: str) -> str:
    """A name that fits beside a chart: the end of a long one, which is where names differ."""
    return name if len(name) <= _NAME_LENGTH else f"…{name[1 - _NAME_LENGTH :]}"


def _difference_axis(versus: Sequence[Mapping[str, Any]], margin: float) -> Axis:
    """Holds every difference, interval and margin; intervals far wider than the rest are cut at the edge."""
    points = [value for one in versus for value in (one["difference"], one["per_request_difference"])]
    ends = [end for one in versus for pair in (one["interval"], one["per_request_interval"]) if pair for end in pair]
    reach = max(abs(value) for value in (*points, 1.5 * margin, 0.01))
    limit = 8 * reach
    return axis_around([0.0, -reach, reach, *(max(-limit, min(limit, end)) for end in ends)], start=150, end=_RIGHT)


def _grid(canvas: Canvas, across: Axis, bottom: float, *, signs: bool) -> None:
    for tick in across.ticks(6):
        canvas.line(across(tick), 8, across(tick), bottom, "grid")
        label = f"{tick:+.2g}" if signs and abs(tick) > 1e-12 else f"{tick:.2g}" if abs(tick) > 1e-12 else "0"
        canvas.text(across(tick), bottom + 13, label, "tick", "middle")


def _whisker(canvas: Canvas, across: Axis, y: float, *, value: float, ends: Sequence[float] | None, css: str, title: str) -> None:
    """A dot with its interval; the ends of an interval that leaves the axis carry no cap."""
    if ends is not None:
        low, high = max(across.low, ends[0]), min(across.high, ends[1])
        canvas.line(across(low), y, across(high), y, f"whisker {css}")
        for end in ends:
            if across.low <= end <= across.high:
                canvas.line(across(end), y - 4, across(end), y + 4, f"whisker {css}")
    canvas.dot(across(value), y, f"fill {css}", title, 5)
