"""Charts put each number where it belongs, and nothing where nothing was measured."""

import copy
import json
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from dflash_model import charts
from tests.made_up_records import STORED

RESULT: dict[str, Any] = json.loads(STORED.read_text())
ALL = (charts.forest_plot, charts.survival_chart, charts.slot_effect_chart, charts.category_chart)


def elements(svg: str, tag: str, css: str = "") -> list[ElementTree.Element]:
    """Elements of a tag whose class begins with `css`."""
    return [element for element in ElementTree.fromstring(svg).iter(tag) if element.get("class", "").startswith(css)]


def titled(svg: str, tag: str) -> dict[str, ElementTree.Element]:
    """Elements of a tag by their hover title."""
    return {element[0].text or "": element for element in elements(svg, tag) if len(element)}


def test_candidates_have_colours_of_their_own_and_the_reference_is_grey() -> None:
    assert charts.series_classes(RESULT) == {"step-000220": "c0", "step-000165": "c1", "release": "ref"}


def test_survival_lines_fall_to_the_right_and_the_better_drafter_is_higher() -> None:
    svg = charts.survival_chart(RESULT)
    lines = {element.get("class", ""): element.get("points", "") for element in elements(svg, "polyline")}
    assert set(lines) == {"series c0", "series c1", "series ref"}
    points = {css: [tuple(map(float, pair.split(","))) for pair in line.split()] for css, line in lines.items()}
    for line in points.values():
        assert len(line) == 7
        assert all(after[0] > before[0] and after[1] >= before[1] for before, after in pairwise(line))
    assert points["series c0"][-1][1] < points["series ref"][-1][1] < points["series c1"][-1][1]


def test_an_unknown_survival_ends_the_line() -> None:
    result = copy.deepcopy(RESULT)
    result["drafters"][0]["slots"][6]["survival"] = None
    (line,) = elements(charts.survival_chart(result), "polyline", "series c0")
    assert len(line.get("points", "").split()) == 6


def test_effect_bars_stand_above_the_axis_for_gains_and_below_for_losses() -> None:
    svg = charts.slot_effect_chart(RESULT)
    zero = float(elements(svg, "line", "axis")[0].get("y1", ""))
    bars = titled(svg, "rect")
    assert len(bars) == 14
    for title, bar in bars.items():
        top, height = float(bar.get("y", "")), float(bar.get("height", ""))
        if ", +" in title:
            assert top + height == pytest.approx(max(zero, top + 1), abs=0.11)
        else:
            assert top == pytest.approx(zero, abs=0.11)


def test_the_forest_puts_the_difference_right_of_zero_if_better() -> None:
    svg = charts.forest_plot(RESULT)
    zero = float(elements(svg, "line", "axis")[0].get("x1", ""))
    dots = titled(svg, "circle")
    assert float(dots["pooled +0.36 [+0.18, +0.53]"].get("cx", "")) > zero
    assert float(dots["pooled -0.25 [-0.40, -0.10]"].get("cx", "")) < zero
    (band,) = elements(svg, "rect", "band")
    left, width = float(band.get("x", "")), float(band.get("width", ""))
    assert left + width / 2 == pytest.approx(zero, abs=0.11)


def test_an_enormous_interval_is_cut_at_the_edge_and_the_rest_stays_readable() -> None:
    result = copy.deepcopy(RESULT)
    result["drafters"][0]["vs_reference"]["interval"] = [-900.0, 900.0]
    svg = charts.forest_plot(result)
    for line in elements(svg, "line"):
        assert 0 <= float(line.get("x1", "")) <= 640
        assert 0 <= float(line.get("x2", "")) <= 640
    dots = titled(svg, "circle")
    ends = [float(dot.get("cx", "")) for title, dot in dots.items() if title.startswith("pooled")]
    assert max(ends) - min(ends) > 20


def test_categories_show_every_drafter_and_skip_what_is_unknown() -> None:
    assert len(titled(charts.category_chart(RESULT), "circle")) == 15
    result = copy.deepcopy(RESULT)
    result["drafters"][1]["categories"]["code"] |= {"tau": None, "interval": None}
    assert len(titled(charts.category_chart(result), "circle")) == 14


def test_labels_that_would_overlap_are_moved_apart() -> None:
    placed = charts.apart([(100.0, "a", ""), (98.0, "b", ""), (40.0, "c", "")], gap=14)
    assert [(text, y) for y, text, _ in placed] == [("a", 100.0), ("b", 86.0), ("c", 40.0)]


def test_long_names_keep_their_end() -> None:
    assert charts.shortened("step-000220") == "step-000220"
    assert charts.shortened("qwen3-8b-dflash-run7-step-000220") == "…n7-step-000220"


def test_nothing_to_draw_is_no_chart() -> None:
    result = copy.deepcopy(RESULT)
    for drafter in result["drafters"]:
        drafter |= {"slots": [], "categories": {}, "vs_reference": None}
    assert [draw(result) for draw in ALL] == ["", "", "", ""]
