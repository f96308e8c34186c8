"""The one table: a row a drafter, on the terminal and as Markdown. On a narrow terminal intervals go below, then slots go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dflash_model.figures import DASH, DrafterRow, drafter_rows, level_percent, slot_count

VERDICT_STYLES = {
    "better": "bold green",
    "worse": "bold red",
    "equal": "cyan",
    "undecided": "yellow",
    "no verdict": "dim",
    "reference": "dim",
    DASH: "dim",
}
_NAME_WIDTH = 24


def drafter_table(result: Mapping[str, Any], *, width: int = 160) -> Table:
    """A rich table that fits `width` columns where 80 or more are given: all columns, as many slots as fit."""
    rows, slots = drafter_rows(result), slot_count(result)
    table = _table(result, rows, list(range(1, slots + 1)), stacked=False)
    for count in range(slots, -1, -1):
        if _width(table) <= width:
            break
        table = _table(result, rows, spread(slots, count), stacked=True)
    return table


def spread(slots: int, count: int) -> list[int]:
    """`count` of the slots 1..`slots`, the first and the last among them, evenly between."""
    if count <= 1:
        return [1][:count]
    return sorted({1 + round(index * (slots - 1) / (count - 1)) for index in range(count)})


def drafter_markdown(result: Mapping[str, Any]) -> str:
    """The same table as Markdown, every slot in it."""
    rows, level = drafter_rows(result), level_percent(result)
    titles = [
        "drafter",
        f"tau [{level}]",
        "per request",
        "top-4 / top-8 streak",
        "DDTree-16 / -64",
        *[f"slot {slot}" for slot in range(1, slot_count(result) + 1)],
        f"vs reference [{level}]",
        "verdict",
    ]
    lines = [titles, ["---", *["---:"] * (len(titles) - 2), "---"]]
    lines += [
        [
            row.name.replace("|", "\\|"),
            f"{row.tau} {row.tau_interval}".strip(),
            row.per_request,
            row.streaks,
            row.trees,
            *row.survival,
            f"{row.difference} {row.difference_interval}".strip(),
            row.verdict,
        ]
        for row in rows
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def drafter_lines(result: Mapping[str, Any]) -> list[str]:
    """A sentence a drafter, for where no table fits: name, tau, difference, verdict."""
    return [
        f"{row.name}: tau {row.tau} {row.tau_interval}".rstrip()
        + (
            f", {row.difference} {row.difference_interval}".rstrip() + f": {row.verdict}"
            if row.difference != DASH
            else f" ({row.verdict})"
        )
        for row in drafter_rows(result)
    ]


def _table(result: Mapping[str, Any], rows: Sequence[DrafterRow], shown: Sequence[int], *, stacked: bool) -> Table:
    level, slots = level_percent(result), slot_count(result)
    between = "\n" if stacked else " "
    table = Table(
        box=None,
        padding=(0, 2 if not stacked else 1, 0, 0),
        header_style="bold",
        caption=_caption(shown, slots),
        caption_justify="left",
    )
    table.add_column("drafter", max_width=_NAME_WIDTH, overflow="fold")
    for title in (f"tau{between}[{level}]", "per\nrequest", "top-4 / 8\nstreak", "DDTree\n16 / 64"):
        table.add_column(Text(title), justify="right", no_wrap=True)
    for slot in shown:
        table.add_column(Text(f"slot\n{slot}" if slot == shown[0] else f"\n{slot}"), justify="right", no_wrap=True)
    table.add_column(Text(f"vs reference{between}[{level}]"), justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.name),
            Text(f"{row.tau}{between}{row.tau_interval}".rstrip()),
            Text(row.per_request),
            Text(row.streaks),
            Text(row.trees),
            *[Text(row.survival[slot - 1]) for slot in shown],
            Text(f"{row.difference}{between}{row.difference_interval}".rstrip()),
            Text(row.verdict, style=VERDICT_STYLES[row.verdict]),
        )
    return table


def _caption(shown: Sequence[int], slots: int) -> str:
    meaning = "tau: tokens per verify step, bonus included, pooled over steps; slot i: share of steps that accept i drafts."
    if len(shown) == slots:
        return meaning
    return f"{meaning} Slots shown: {', '.join(map(str, shown)) or 'none'} of {slots}; a wider terminal shows more."


def _width(table: Table) -> int:
    """Columns that the table wants, its caption aside."""
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum
