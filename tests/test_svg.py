"""Axes and the SVG canvas."""

from xml.etree import ElementTree

import pytest

from dflash_model.svg import Axis, Canvas, axis_around, round_step


def test_an_axis_maps_values_to_the_canvas_in_either_direction() -> None:
    assert [Axis(low=0, high=2, start=100, end=300)(value) for value in (0, 1, 2)] == [100, 200, 300]
    assert [Axis(low=0, high=1, start=290, end=14)(value) for value in (0, 0.5, 1)] == [290, 152, 14]


@pytest.mark.parametrize(("wanted", "step"), [(0.2, 0.2), (0.21, 0.5), (0.6, 1.0), (7.0, 10.0), (1.0, 1.0), (0.013, 0.02)])
def test_steps_are_round(wanted: float, step: float) -> None:
    assert round_step(wanted) == pytest.approx(step)


def test_ticks_are_round_and_inside() -> None:
    assert Axis(low=-0.31, high=0.72, start=0, end=1).ticks() == pytest.approx([0.0, 0.5])
    assert Axis(low=0, high=1, start=0, end=1).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_equal_values_still_make_an_axis() -> None:
    axis = axis_around([3.0, 3.0], start=0, end=10)
    assert (axis.low, axis(3.0), axis.high) == (2.5, 5.0, 3.5)


def test_texts_and_titles_are_escaped() -> None:
    canvas = Canvas(height=10, label='a "quoted" <b>')
    canvas.text(1, 2, "<script>&")
    canvas.dot(1, 2, "fill c0", "<i>")
    canvas.rect(0, 0, 1, 1, "band")
    root = ElementTree.fromstring(canvas.markup())
    assert root.attrib["aria-label"] == 'a "quoted" <b>'
    assert [element.text for element in root.iter("text")] == ["<script>&"]
    assert [element.text for element in root.iter("title")] == ["<i>"]
