"""report.html from a result: one self-contained page that answers who wins, by how much, how sure, and at which slot.

`run` (hosts, times, versions) stays apart from the result on purpose: two equal evaluations differ only there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from dflash_model import charts, figures

_FACT_NAMES = {
    "n": "tokens compared",
    "agree": "share that agrees",
    "hard_rate": "share that disagrees by more than a near tie",
    "max_gap_nats": "largest gap (nats)",
    "mean_nll_nats": "mean -log p of the reference (nats)",
    "delta_median_nats": "median difference to the recorded log p (nats)",
    "delta_p99_nats": "99th percentile of that (nats)",
}
_VERDICT_MARKS = {"better": "▲", "worse": "▼", "equal": "=", "undecided": "?", "no verdict": "–"}


def render_report(result: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> str:
    """The page as HTML. `result` is build_result's value; `run`, if given:

    {"run_id", "started_at", "finished_at", "stages": [{"name", "host", "state": "ran" | "cached", "seconds"}],
    "versions": {name: version}, "ui_url": str | None}.
    """
    environment = Environment(
        loader=PackageLoader("dflash_model", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": figures.number,
        "signed": figures.signed,
        "interval": figures.interval,
        "signed_interval": figures.signed_interval,
        "percent": figures.percent,
        "seconds": duration,
    }
    return environment.get_template("report.html.j2").render(
        result=result,
        run=run,
        cards=verdict_cards(result),
        rows=figures.drafter_rows(result),
        slots=figures.slot_count(result),
        level=figures.level_percent(result),
        classes=charts.series_classes(result),
        charts={
            "forest": charts.forest_plot(result),
            "survival": charts.survival_chart(result),
            "slot_effects": charts.slot_effect_chart(result),
            "categories": charts.category_chart(result),
        },
        masks={drafter["name"]: mask_words(drafter["spec"]) for drafter in result["drafters"]},
        requests=request_table(result),
        gaps=gap_tables(result),
        groups=group_rows(result),
        others=other_tau_rows(result),
        fidelity=scalar_facts({key: value for key, value in (result["fidelity"] or {}).items() if key != "verdict"}),
        target=scalar_facts(result["target"]),
        prompts=scalar_facts(result["prompts"]),
    )


def verdict_cards(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the top of the page shows of each candidate that was compared."""
    taus = {drafter["name"]: drafter["tau"]["pooled"] for drafter in result["drafters"]}
    cards = []
    for drafter in result["drafters"]:
        versus = drafter["vs_reference"]
        if versus is None:
            continue
        slot = versus["parts_at_slot"]
        cards.append(
            {
                "name": drafter["name"],
                "versus": versus,
                "tau": taus[drafter["name"]],
                "reference_tau": taus[versus["reference"]],
                "mark": _VERDICT_MARKS[versus["verdict"]],
                "slot": slot,
                "slot_effect": versus["slot_effects"][slot - 1] if slot is not None else None,
            }
        )
    return cards


def request_table(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a prompt: tau of each drafter; the first candidate's heaviest losses against the reference first."""
    drafters = result["drafters"]
    reference = next((drafter for drafter in drafters if drafter["role"] == "reference"), None)
    candidate = next((drafter for drafter in drafters if drafter["role"] != "reference"), None)
    table = []
    for index, request in enumerate(drafters[0]["requests"]):
        extra_steps = 0
        if reference is not None and candidate is not None:
            extra_steps = candidate["requests"][index]["steps"] - reference["requests"][index]["steps"]
        cells = [drafter["requests"][index] for drafter in drafters]
        table.append(
            {
                "sample_id": request["sample_id"],
                "category": request["category"],
                "extra_steps": extra_steps,
                "cells": [
                    {"steps": cell["steps"], "tau": cell["tokens"] / cell["steps"] if cell["steps"] else None} for cell in cells
                ],
            }
        )
    return sorted(table, key=lambda row: (-row["extra_steps"], row["sample_id"]))


def group_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a group of prompts: its prompts, and candidate -> difference and interval there."""
    candidates = [drafter for drafter in result["drafters"] if drafter["vs_reference"] is not None]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for drafter in candidates:
        for group in drafter["vs_reference"].get("groups", []):
            row = found.setdefault(
                (group["axis"], group["group"]),
                {
                    "axis": group["axis"],
                    "group": group["group"],
                    "prompts": group["prompts"],
                    "cells": {candidate["name"]: None for candidate in candidates},
                },
            )
            row["cells"][drafter["name"]] = group
    return list(found.values())


def gap_tables(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A candidate's gap by slot and by category; none for a candidate without a gap, or in a result of an older program."""
    tables = []
    for drafter in result["drafters"]:
        attribution = (drafter["vs_reference"] or {}).get("attribution")
        if attribution is None or not attribution["sentence"]:
            continue
        rows = [
            {"what": what, "parts": attribution[what + "s" if what == "slot" else "categories"]} for what in ("slot", "category")
        ]
        tables.append({"name": drafter["name"], "rows": [row for row in rows if row["parts"]]})
    return tables


def other_tau_rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a figure that any drafter has: its cells in the drafters' order, and its definition."""
    columns = [{figure["name"]: figure for figure in drafter.get("other_taus", [])} for drafter in result["drafters"]]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        figures_of = [column.get(name) for column in columns]
        first = next(figure for figure in figures_of if figure is not None)
        cells = [figure["value"] if figure else None for figure in figures_of]
        if any(cell is not None for cell in cells):
            rows.append({key: first[key] for key in ("name", "definition", "bonus", "aggregation")} | {"cells": cells})
    return rows


def mask_words(spec: Mapping[str, Any]) -> str:
    """The mask policies of a drafter's layers in words, equal ones counted."""
    words: dict[str, int] = {}
    for mask in spec["layer_masks"]:
        window = "all context" if mask["window"] is None else f"window {mask['window']} from the {mask['window_origin']}"
        text = f"{mask['in_block']}, {window}"
        words[text] = words.get(text, 0) + 1
    return "; ".join(f"{count} × {text}" for text, count in words.items())


def scalar_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that fit on a line, under readable names: numbers, strings and truth values; digests shortened."""
    shown: dict[str, Any] = {}
    for key, value in facts.items():
        name = _FACT_NAMES.get(key, key.replace("_", " "))
        if isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef"):
            shown[name] = f"{value[:12]}…"
        elif isinstance(value, float):
            shown[name] = f"{value:.4g}"
        elif isinstance(value, str | int | bool):
            shown[name] = value
    return shown


def duration(seconds: float | None) -> str:
    """4.2 s, 3 min 20 s, 2 h 5 min."""
    if seconds is None:
        return figures.DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
