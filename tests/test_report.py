"""report.html: whole, self-contained, safe with any name, and honest about what is missing."""

import copy
import json
from html.parser import HTMLParser
from typing import Any

import pytest

from dflash_model.report import duration, mask_words, render_report, request_table, scalar_facts, verdict_cards
from tests.made_up_records import STORED

RESULT: dict[str, Any] = json.loads(STORED.read_text())
RUN: dict[str, Any] = {
    "run_id": "smoky-otter",
    "started_at": "2025-11-29T02:00:04Z",
    "finished_at": "2025-11-29T02:14:31Z",
    "stages": [
        {"name": "hidden_states", "host": "gpu-a", "state": "cached", "seconds": None},
        {"name": "replay", "host": "eval", "state": "ran", "seconds": 412.0},
    ],
    "versions": {"torch": "2.13.0"},
    "ui_url": None,
}
VOID = {"meta", "br", "link", "img", "input", "hr", "line", "polyline", "circle", "rect"}


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps text, tags and the addresses that a browser would load or offer."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in VOID or tag in ("circle", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_warnings_stand_above_the_numbers_and_only_where_there_are_some() -> None:
    text = Page(render_report(RESULT, RUN)).text
    assert "step-000165: Nothing states the attention masks <of this one>." in text
    assert text.index("Warnings") < text.index("per request")
    without = copy.deepcopy(RESULT)
    for drafter in without["drafters"]:
        drafter["warnings"] = []
    assert "Warnings" not in Page(render_report(without, RUN)).text
    for drafter in without["drafters"]:
        del drafter["warnings"]  # as version 1 of the schema has it
    assert "Warnings" not in Page(render_report(without, RUN)).text


def test_the_page_asks_nobody_for_anything() -> None:
    html = render_report(RESULT, RUN)
    page = Page(html)
    assert page.addresses == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for loader in ("url(", "@import", "http://", "https://"):
        assert loader not in html
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html


def test_the_top_says_who_wins_by_how_much_and_where() -> None:
    html = render_report(RESULT)
    text = " ".join(Page(html).text.split())
    top = text[: text.index("DDTree")]
    for needed in (
        "▲ better step-000220 against release",
        "+0.36 tokens per step, 95% [+0.18, +0.53] · +8.5%",
        "tau 4.56 against 4.20 on 60 prompts · won most at slot 4 (+0.11)",
        "▼ worse step-000165 against release",
        "lost most at slot 5 (-0.06)",
        RESULT["drafters"][0]["vs_reference"]["sentence"],
    ):
        assert needed in top


def test_the_page_has_the_table_the_charts_and_every_definition() -> None:
    html = render_report(RESULT, RUN)
    page = Page(html)
    assert page.tags.count("svg") == 4
    for entry in RESULT["definitions"]:
        assert entry["definition"] in page.text
    for column in ("top-4 / top-8 streak", "DDTree-16 / -64", "slot 7", "vs reference [95%]"):
        assert column in page.text
    for request in RESULT["drafters"][0]["requests"]:
        assert request["sample_id"] in page.text
    assert "2 × bidirectional, all context" in page.text


def test_the_run_is_shown_only_if_there_is_one() -> None:
    with_run, without = Page(render_report(RESULT, RUN)).text, Page(render_report(RESULT)).text
    for fact in ("smoky-otter", "gpu-a", "cached", "6 min 52 s", "2.13.0"):
        assert fact in with_run
        assert fact not in without
    linked = Page(render_report(RESULT, RUN | {"ui_url": "http://relay:4200/runs/1"}))
    assert linked.addresses == ["http://relay:4200/runs/1"]


def test_the_same_result_gives_the_same_page() -> None:
    assert render_report(RESULT) == render_report(copy.deepcopy(RESULT))


def test_names_from_outside_are_text() -> None:
    result = copy.deepcopy(RESULT)
    evil = '<script>alert("x")</script>'
    result["drafters"][0] |= {"name": evil}
    result["drafters"][0]["requests"][0] |= {"sample_id": evil, "category": evil}
    result["target"]["name"] = evil
    result["headline"] = evil
    for drafter in result["drafters"]:
        drafter["categories"][evil] = drafter["categories"].pop("code")
    page = Page(render_report(result, RUN | {"run_id": evil}))
    assert "script" not in page.tags
    assert page.text.count(evil) >= 5


def test_nothing_measured_shows_dashes_and_no_zero() -> None:
    result = copy.deepcopy(RESULT)
    for drafter in result["drafters"]:
        drafter["tau"] |= {"pooled": None, "interval": None, "per_request": None, "per_request_interval": None}
        drafter |= {"streak": {"4": None, "8": None}, "ddtree": {"16": None, "64": None}, "slots": [], "categories": {}}
        drafter |= {
            "near_ties": None,
            "step": None,
            "requests": [request | {"steps": 0, "tokens": 0} for request in drafter["requests"]],
        }
        drafter["other_taus"] = [figure | {"value": None} for figure in drafter["other_taus"]]
        if drafter["vs_reference"]:
            drafter["vs_reference"] |= dict.fromkeys(
                ("difference", "interval", "relative_difference", "per_request_difference", "equal_within", "parts_at_slot")
            )
            drafter["vs_reference"] |= {"verdict": "no verdict", "slot_effects": [], "prompts": 0}
            drafter["vs_reference"]["attribution"] = {"slots": [], "categories": [], "sentence": ""}
    result["fidelity"] = None
    page = Page(render_report(result))
    assert page.tags.count("svg") == 0
    assert "Not measured." in page.text
    assert "– / –" in page.text
    assert "0.00" not in page.text[: page.text.index("What the numbers mean")]


def test_without_a_reference_the_headline_stands_alone() -> None:
    result = copy.deepcopy(RESULT)
    result["drafters"] = [result["drafters"][0] | {"vs_reference": None}]
    result["headline"] = "step-000220 has tau 4.56; there is no reference to compare with."
    page = Page(render_report(result))
    assert result["headline"] in page.text
    assert "against" not in page.text[: page.text.index("DDTree")]


def test_warnings_of_the_fidelity_gate_are_shown() -> None:
    result = copy.deepcopy(RESULT)
    result["fidelity"] |= {"verdict": "WARN", "reasons": ["Only 120 tokens were compared."]}
    text = Page(render_report(result)).text
    assert "WARN" in text
    assert "Only 120 tokens were compared." in text


def test_a_verdict_card_names_the_slot_where_the_two_part() -> None:
    better, worse = verdict_cards(RESULT)
    assert (better["mark"], better["slot"], better["slot_effect"]) == ("▲", 4, pytest.approx(0.114, abs=1e-3))
    assert (worse["mark"], worse["slot"]) == ("▼", 5)


def test_the_prompts_that_lose_most_come_first() -> None:
    table = request_table(RESULT)
    assert len(table) == 60
    extra = [row["extra_steps"] for row in table]
    assert extra == sorted(extra, reverse=True)
    assert extra[0] > 0 > extra[-1]
    first = table[0]
    by_name = [next(r for r in d["requests"] if r["sample_id"] == first["sample_id"]) for d in RESULT["drafters"]]
    assert [cell["steps"] for cell in first["cells"]] == [request["steps"] for request in by_name]


def test_masks_are_counted_in_words() -> None:
    full = {"in_block": "bidirectional", "window": None, "window_origin": "query"}
    window = {"in_block": "causal", "window": 2048, "window_origin": "anchor"}
    assert (
        mask_words({"layer_masks": [window, window, full]})
        == "2 × causal, window 2048 from the anchor; 1 × bidirectional, all context"
    )


def test_facts_fit_on_a_line() -> None:
    facts = {"digest": "ab" * 32, "hard_rate": 0.00125, "samples": [1, 2], "nothing": None, "template": "chat", "ok": True}
    assert scalar_facts(facts) == {
        "digest": "abababababab…",
        "share that disagrees by more than a near tie": "0.00125",
        "template": "chat",
        "ok": True,
    }


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "–"), (4.21, "4.2 s"), (59.9, "59.9 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown
