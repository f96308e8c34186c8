"""The frame of every benchmark: rows that may have a bar, the machine, the versions, a table for people and a line of JSON.

The last line of stdout with --json is {"name", "machine", "versions", "results"}; a result is {"what", "value", "unit",
"bar", "holds"}. What was not measured has the value null, never 0, and a "reason".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def row(
    what: str,
    value: float | None,
    unit: str,
    *,
    most: float | None = None,
    least: float | None = None,
    digits: int = 3,
    reason: str | None = None,
) -> Row:
    """One result, judged before it is rounded. `most`, `least`: its bar; without one it is reported only.

    `value` None: it was not measured, for `reason`. Raises ValueError for a null without a reason, and for two bars.
    """
    if most is not None and least is not None:
        raise ValueError(f"{what} has two bars")
    if (value is None) != (reason is not None):
        raise ValueError(f"{what}: a reason belongs to what was not measured, and to nothing else")
    bar = f"<= {most:g}" if most is not None else f">= {least:g}" if least is not None else None
    holds = None
    if value is not None and most is not None:
        holds = value <= most
    elif value is not None and least is not None:
        holds = value >= least
    found = {"what": what, "value": None if value is None else round(value, digits), "unit": unit, "bar": bar, "holds": holds}
    return found if reason is None else found | {"reason": reason}


def arguments(head_note: str | None) -> argparse.ArgumentParser:
    """A parser with --json, to which a benchmark adds its own options."""
    parser = argparse.ArgumentParser(description=head_note, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    return parser


def report(name: str, rows: Sequence[Row], *, packages: Sequence[str], as_json: bool) -> None:
    """Print the rows for people and, `as_json`, the line for machines. `packages`: whose versions the figures depend on."""
    for one in rows:
        print(as_text(one))
    if as_json:
        versions = {"python": platform.python_version()} | {package: version(package) for package in packages}
        print(json.dumps({"name": name, "machine": machine(), "versions": versions, "results": list(rows)}))


def as_text(one: Row) -> str:
    """A row as a line of a table."""
    value = "-" if one["value"] is None else one["value"]
    verdict = one.get("reason") or {True: "holds", False: "DOES NOT HOLD", None: ""}[one["holds"]]
    return f"{one['what']:48} {value:>8} {one['unit']:6} {one['bar'] or '':8} {verdict}".rstrip()


def machine() -> str:
    """Architecture, system, processor and the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {platform.system()}, {_processor()}, {cores} cores"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"
