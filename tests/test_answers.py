"""Answers in pieces: each line once, rubbish skipped, whatever the pieces are."""

import json

import pytest

from tasks.remote.answers import MAX_LINE_BYTES, AnswerLines

EVENTS = [{"event": "progress", "done": n, "note": "é" * n} for n in range(20)]
TEXT = b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in EVENTS)


@pytest.mark.parametrize("size", [1, 7, 64, len(TEXT)])
def test_pieces_of_any_size_give_each_event_once(size: int) -> None:
    lines = AnswerLines()
    found = [event for start in range(0, len(TEXT), size) for event in lines.feed(TEXT[start : start + size])]
    assert found == EVENTS


def test_rubbish_is_skipped() -> None:
    assert AnswerLines().feed(b'no\n[1]\n\xff\xfe\n3\n\n{"event": "x"}\n') == [{"event": "x"}]


def test_half_a_line_waits_for_its_end() -> None:
    lines = AnswerLines()
    assert lines.feed(b'{"event"') == []
    assert lines.feed(b': "x"}') == []
    assert lines.feed(b"\n") == [{"event": "x"}]


def test_a_line_that_is_too_long_is_skipped_to_its_very_end() -> None:
    lines = AnswerLines()
    assert lines.feed(b"x" * (MAX_LINE_BYTES + 1)) == []
    assert lines.feed(b'{"event": "the tail of it"}') == []
    assert lines.feed(b'\n{"event": "next"}\n') == [{"event": "next"}]
