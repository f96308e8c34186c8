"""Listening to a run: what was heard before a failure is not heard again, and a finished stage is past every deadline."""

import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from dflash_model.errors import DeadlineExceeded, HostError
from tasks.remote.follower import Follower
from tasks.remote.supervised_run import Look, SupervisedRun
from tests.local_shell import LocalShell

ANSWERS = b"".join(b'{"event": "counted", "number": %d}\n' % number for number in range(100))
BLOCK_BYTES = 300
"""Not a multiple of a line: most blocks end within one."""


class Scripted(SupervisedRun):
    """A run whose looks are written down, and whose reads fail when `fails` says so."""

    def __init__(self, looks: list[Look], fails: Callable[[], bool]) -> None:
        super().__init__(LocalShell(), PurePosixPath("/none"), python="", code_dir=PurePosixPath("/none"), variables={})
        self.looks, self.fails = looks, fails

    def look(self) -> Look:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def read_block(self, name: str, start: int) -> bytes:
        if self.fails():
            raise HostError("The link is down.", "Wait.")
        return ANSWERS[start : start + BLOCK_BYTES] if name == "answers.jsonl" else b""


def look(*, ended: bool, answers_bytes: int = len(ANSWERS), alive: bool = True) -> Look:
    return Look(alive=alive, ending={"exit_code": 0} if ended else None, answers_bytes=answers_bytes, log_bytes=0)


def follower(run: SupervisedRun, tmp_path: Path, events: list[dict[str, Any]], *, deadline_s: float = 60) -> Follower:
    return Follower(
        run,
        what="[h] stage x",
        log_path=tmp_path / "log",
        deadline_s=deadline_s,
        on_event=events.append,
        grace_s=5,
        poll_s=0.01,
    )


def test_events_come_once_and_in_order_whatever_fails_in_between(tmp_path: Path) -> None:
    calls = iter(range(10_000))
    run = Scripted(
        [look(ended=False, answers_bytes=n) for n in (0, 1, 777, 2000)] + [look(ended=True)], lambda: next(calls) % 3 == 1
    )
    events: list[dict[str, Any]] = []
    assert follower(run, tmp_path, events).follow() == {"exit_code": 0}
    assert next(calls) > 15
    assert [event["number"] for event in events] == list(range(100))


def test_a_stage_that_has_ended_is_past_its_deadline_no_more(tmp_path: Path) -> None:
    up_at = time.monotonic() + 0.5
    events: list[dict[str, Any]] = []
    run = Scripted([look(ended=True)], lambda: time.monotonic() < up_at)
    assert follower(run, tmp_path, events, deadline_s=0.2).follow() == {"exit_code": 0}
    assert len(events) == 100


def test_a_stage_that_has_not_ended_is_not_waited_for_past_its_deadline(tmp_path: Path) -> None:
    up_at = time.monotonic() + 0.5
    run = Scripted([look(ended=False)], lambda: time.monotonic() < up_at)
    with pytest.raises(DeadlineExceeded, match=r"deadline of 0\.2 s"):
        follower(run, tmp_path, [], deadline_s=0.2).follow()


def test_a_supervisor_that_is_gone_without_an_ending_is_a_host_error_after_its_last_events(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    with pytest.raises(HostError, match="gone without a word"):
        follower(Scripted([look(ended=False, alive=False)], lambda: False), tmp_path, events).follow()
    assert len(events) == 100
