"""The table fits its terminal, and the Markdown has every column."""

import copy
import json
from typing import Any

import pytest
from rich.console import Console

from dflash_model.table import drafter_markdown, drafter_table, spread
from tests.made_up_records import STORED

RESULT: dict[str, Any] = json.loads(STORED.read_text())


def printed(result: dict[str, Any], width: int) -> list[str]:
    """The table's lines on a terminal of `width` columns, trailing blanks gone."""
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(drafter_table(result, width=width))
    return [line.rstrip() for line in captured.get().splitlines()]


def with_slots(count: int) -> dict[str, Any]:
    result = copy.deepcopy(RESULT)
    for drafter in result["drafters"]:
        drafter["slots"] = [drafter["slots"][0] | {"slot": slot, "survival": 0.9**slot} for slot in range(1, count + 1)]
    return result


def test_a_wide_terminal_gets_one_line_a_drafter_with_every_slot() -> None:
    lines = printed(RESULT, 160)
    assert lines[2].split() == [
        "step-000220", "4.56", "[4.38,", "4.74]", "4.75", "7.03", "/", "7.37", "5.18", "/", "6.15",
        ".87", ".73", ".61", ".51", ".41", ".31", ".23", "+0.36", "[+0.18,", "+0.53]", "better",
    ]  # fmt: skip
    assert lines[4].split()[-2:] == ["–", "reference"]
    assert len(lines) == 6


@pytest.mark.parametrize("width", [80, 100, 120, 160])
@pytest.mark.parametrize("slots", [1, 7, 15])
def test_nothing_is_cut_at_any_width(width: int, slots: int) -> None:
    lines = printed(with_slots(slots), width)
    assert max(len(line) for line in lines) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for needed in ("4.56", "[4.38, 4.74]", "7.03 / 7.37", "5.18 / 6.15", "[+0.18, +0.53]", "better", "worse"):
        assert needed in text


def test_fifteen_slots_fit_into_160_columns() -> None:
    lines = printed(with_slots(15), 160)
    assert "Slots shown" not in "\n".join(lines)
    assert len([word for word in lines[2].split() if word.startswith(".")]) == 15


def test_a_narrow_terminal_says_which_slots_it_shows() -> None:
    text = " ".join(printed(with_slots(15), 100))
    assert "Slots shown: 1, 6, 10, 15 of 15" in text
    assert "Slots shown: none of 15" in " ".join(printed(with_slots(15), 80))


@pytest.mark.parametrize(
    ("slots", "count", "chosen"), [(7, 7, [1, 2, 3, 4, 5, 6, 7]), (7, 4, [1, 3, 5, 7]), (15, 2, [1, 15]), (7, 1, [1]), (7, 0, [])]
)
def test_slots_are_spread_from_the_first_to_the_last(slots: int, count: int, chosen: list[int]) -> None:
    assert spread(slots, count) == chosen


def test_a_name_is_text_and_not_markup() -> None:
    result = copy.deepcopy(RESULT)
    result["drafters"][0]["name"] = "[red]a|b"
    assert "[red]a|b" in "\n".join(printed(result, 160))
    assert "[red]a\\|b" in drafter_markdown(result)


def test_markdown_has_every_column_and_one_row_a_drafter() -> None:
    header, rule, *body = drafter_markdown(with_slots(15)).splitlines()
    titles = [title.strip() for title in header.strip("|").split("|")]
    assert titles[:6] == ["drafter", "tau [95%]", "per request", "top-4 / top-8 streak", "DDTree-16 / -64", "slot 1"]
    assert titles[-3:] == ["slot 15", "vs reference [95%]", "verdict"]
    assert {len(line.strip("|").split("|")) for line in (rule, *body)} == {len(titles)}
    assert [line.split("|")[1].strip() for line in body] == ["step-000220", "step-000165", "release"]


def test_what_was_not_measured_is_a_dash() -> None:
    result = copy.deepcopy(RESULT)
    drafter = result["drafters"][0]
    drafter["ddtree"]["64"] = None
    drafter["tau"]["interval"] = None
    drafter["slots"][6]["survival"] = None
    drafter["vs_reference"] |= {"difference": None, "interval": None, "verdict": "no verdict"}
    row = drafter_markdown(result).splitlines()[2]
    assert (
        row == "| step-000220 | 4.56 | 4.75 | 7.03 / 7.37 | 5.18 / – | .87 | .73 | .61 | .51 | .41 | .31 | – | – | no verdict |"
    )
