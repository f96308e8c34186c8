"""The zoo's table: what each drafter is, and what its records say. Written to deployments/zoo/README.md.

    python deployments/zoo/zoo_table.py

tau counts the bonus token and is pooled over steps; its 95% interval resamples prompts. Everything stands on records,
which are replayed where they are missing.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from replay_zoo import STREAKS, records_of_all
from zoo_entries import DRAFTERS, HERE, NOTES_NAME, PROMPTS, entries, read_table

from dflash_model.intervals import Ratio, estimate
from dflash_model.metrics import RequestRow, by_category, request_rows, streak_tau, tau_pooled
from dflash_model.replay.records import SampleRecords
from dflash_model.slots import slot_rates
from dflash_model.storage import write_file

INTRODUCTION = """# The zoo

One small drafter per convention that the loader reads, and one per training bug that is known from public reports: each is trained by
`dflash_model/training` from [zoo.yaml](zoo.yaml) on the bundled targets' own answers, and evaluated from what it declares. `make zoo` trains
what is missing (one thread), `make zoo-table` replays and writes this page. They are trained for {steps} steps, far less than a drafter in
use, so compare them with each other only.

A bug need not show in tau: some cost nothing at this size, and their own training metrics look healthy, which is why they are kept.

- **tau [95%]**: tokens per verify step, bonus token included, pooled over {prompts} held-out prompts; below it by category.
- **top-4 / 8**: the same if a slot counted as right whenever the true token is among its 4 or 8 best: an upper bound for trees that wide.
- **slots**: how often each slot's own token was right at the visited anchors, the others aside.
- **training**: the trainer's own last sample: loss in nats, slot 1 and last slot accuracy, mean run + 1 at random anchors.

"""


def main() -> None:
    """Write the page."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    table = read_table()
    records = records_of_all(table)
    categories = {prompt["id"]: prompt["category"] for prompt in map(json.loads, PROMPTS.read_text().splitlines())}
    names = list(dict.fromkeys(categories.values()))
    order = [name for entry in entries(table) for name, _ in entry.drafters()]
    lines = [
        f"| drafter | what it is | tau [95%] | {' / '.join(names)} | top-4 / 8 | slots | training |",
        "|---|---|---|---|---|---|---|",
    ]
    missing = [name for name in order if name not in records]
    for name in order:
        if name in records:
            lines.append(table_row(name, records[name], categories, names))
    page = INTRODUCTION.format(steps=table["base"]["steps"], prompts=len(categories)) + "\n".join(lines) + "\n"
    if missing:
        page += f"\nIn zoo.yaml, but not trained yet: {', '.join(missing)}.\n"
    write_file(HERE / "README.md", page.encode())


def table_row(name: str, samples: Sequence[SampleRecords], categories: dict[str, str], names: Sequence[str]) -> str:
    """One line of the table."""
    notes = json.loads((DRAFTERS / name / NOTES_NAME).read_text(encoding="utf-8"))
    rows = request_rows(samples, categories=categories)
    groups = by_category(rows)
    parts = [
        name,
        notes["what"] if notes["step"] == notes["steps"] else f"{notes['what']}, step {notes['step']} of {notes['steps']}",
        with_interval(rows),
        " / ".join(with_interval(groups[category]) for category in names),
        " / ".join(as_text(streak_tau(samples, width).value, 2) for width in STREAKS),
        " ".join(as_text(rate.accuracy, 2).removeprefix("0") for rate in slot_rates(samples)),
        training_text(notes["last"]),
    ]
    return f"| {' | '.join(parts)} |"


def with_interval(rows: Sequence[RequestRow]) -> str:
    """tau and its interval; the value alone where one prompt has steps."""
    counted = [row for row in rows if row.steps]
    value = as_text(tau_pooled(rows).value, 2)
    if len(counted) < 2:
        return value
    tokens, steps = (np.array([getattr(row, name) for row in counted], dtype=np.float64) for name in ("tokens", "steps"))
    low, high = estimate(Ratio(numerator=tokens, denominator=steps)).interval()
    return f"{value} [{low:.2f}, {high:.2f}]"


def training_text(last: dict[str, Any] | None) -> str:
    """What training itself said at the end."""
    if last is None:
        return "–"
    metrics = last["metrics"]
    slots = metrics["slot_accuracy"]
    return f"{last['loss']:.2f}; {as_text(slots[0], 2)}, {as_text(slots[-1], 2)}; {as_text(metrics['eal_runs'], 2)}"


def as_text(value: float | None, digits: int) -> str:
    """A dash for what was not measured."""
    return "–" if value is None else f"{value:.{digits}f}"


if __name__ == "__main__":
    main()
