"""Rows of benchmarks: the bar judges the unrounded value, and what was not measured is never 0."""

import json
import platform

import pytest

from tests.benchmarks.reporting import as_text, report, row


def test_a_row_is_judged_by_its_bar_before_it_is_rounded() -> None:
    assert row("x", 1.5, "s", most=1.5) == {"what": "x", "value": 1.5, "unit": "s", "bar": "<= 1.5", "holds": True}
    assert row("x", 1.5004, "s", most=1.5) == {"what": "x", "value": 1.5, "unit": "s", "bar": "<= 1.5", "holds": False}
    assert row("x", 0.93, "share", least=0.93)["holds"] is True
    assert row("x", 0.92999, "share", least=0.93, digits=4) == {
        "what": "x",
        "value": 0.93,
        "unit": "share",
        "bar": ">= 0.93",
        "holds": False,
    }
    assert row("x", 3, "s")["holds"] is None


def test_what_was_not_measured_is_null_with_its_reason() -> None:
    missing = row("x", None, "s", most=3, reason="the lab needs root")
    assert missing == {"what": "x", "value": None, "unit": "s", "bar": "<= 3", "holds": None, "reason": "the lab needs root"}
    assert as_text(missing).split() == ["x", "-", "s", "<=", "3", "the", "lab", "needs", "root"]
    for value, reason in ((None, None), (0.0, "the lab needs root")):
        with pytest.raises(ValueError, match="not measured"):
            row("x", value, "s", reason=reason)
    with pytest.raises(ValueError, match="two bars"):
        row("x", 1, "s", most=1, least=1)


def test_people_get_a_table_and_machines_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("x", 1, "s", most=2), row("y", 3, "s", most=2)]
    report("bench", rows, packages=["numpy"], as_json=True)
    *table, last = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in table] == ["holds", "HOLD"]
    told = json.loads(last)
    assert (told["name"], told["results"]) == ("bench", rows)
    assert set(told["versions"]) == {"python", "numpy"}
    assert told["machine"].startswith(f"{platform.machine()}, Linux, ")
    report("bench", rows, packages=[], as_json=False)
    assert capsys.readouterr().out.splitlines() == table
