"""The notes of a transfer: taken up only for the same stretches, replaced whole, for one run at a time."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_model.errors import Cancelled
from tasks.remote.journal import KEPT_MARKS, Journal, Span, open_journal, relay_id

ROOT = Path(__file__).resolve().parent.parent


def nothing() -> None:
    return


def test_notes_survive_and_speak_of_the_same_stretches_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "t.json")
    journal.resume([(0, 10), (10, 30)])
    first = Span(begin=10, end=15, sha256="a", reads=[("f", 1, 2, "b")])
    journal.settle(1, [first])
    for end in range(16, 16 + KEPT_MARKS + 3):
        journal.mark(1, Span(begin=15, end=end, sha256=str(end)))
    again = Journal(tmp_path / "t.json")
    again.resume([(0, 10), (10, 30)])
    assert again.parts == journal.parts
    assert again.parts[1].spans == [first]
    assert [mark.end for mark in again.parts[1].marks] == list(range(19, 16 + KEPT_MARKS + 3))
    again.resume([(0, 30)])
    assert [(part.begin, part.end, part.spans, part.marks) for part in again.parts] == [(0, 30, [], [])]
    again.forget()
    assert list(tmp_path.iterdir()) == []
    again.forget()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 2, "parts": []}', '{"format_version": 1, "parts": [{}]}'])
def test_rubbish_is_no_notes(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    journal = Journal(tmp_path / "t.json")
    journal.resume([(0, 10)])
    assert [(part.begin, part.end, part.spans) for part in journal.parts] == [(0, 10, [])]


def test_one_run_at_a_time_and_a_killed_one_holds_nobody_up(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from tasks.remote.journal import open_journal;\n"
        "with open_journal(pathlib.Path(sys.argv[1]), 't', check=lambda: None):\n    print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    entered = threading.Event()

    def enter() -> None:
        with open_journal(tmp_path, "t", check=nothing):
            entered.set()

    waiting = threading.Thread(target=enter)
    waiting.start()
    assert not entered.wait(0.7)
    with open_journal(tmp_path, "another", check=nothing):
        pass

    def give_up() -> None:
        raise Cancelled("The run is ending.")

    with pytest.raises(Cancelled), open_journal(tmp_path, "t", check=give_up):
        pass
    other.kill()
    other.communicate()
    assert entered.wait(10)
    waiting.join()


def test_old_notes_go_and_the_relay_keeps_its_name(tmp_path: Path) -> None:
    name = relay_id(tmp_path)
    assert (len(name), relay_id(tmp_path)) == (8, name)
    assert relay_id(tmp_path / "elsewhere") != name
    old, fresh = tmp_path / "old.json", tmp_path / "fresh.json"
    for path, days in ((old, 15), (fresh, 13)):
        path.write_text("{}")
        at = time.time() - days * 86_400
        os.utime(path, (at, at))
    with open_journal(tmp_path, "t", check=nothing):
        assert not old.exists()
        assert fresh.exists()
    (tmp_path / "relay-id").write_text("")
    assert relay_id(tmp_path) == "0", "a run killed while it made the name"
