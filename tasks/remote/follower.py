"""Listening to a run on a host until it has ended, over a link that may be cut: nothing is lost, nothing comes twice."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_model.errors import EvalError, HostError, from_os_error
from tasks.remote import failures
from tasks.remote.answers import AnswerLines
from tasks.remote.host import OnEvent
from tasks.remote.patience import Patience, pause
from tasks.remote.processes import ending
from tasks.remote.supervised_run import Look, SupervisedRun

log = logging.getLogger(__name__)


class Follower:
    """Listens to one started run: its log goes to a file, each of its events to `on_event` exactly once."""

    def __init__(
        self,
        run: SupervisedRun,
        *,
        what: str,
        log_path: Path,
        deadline_s: float,
        on_event: OnEvent,
        grace_s: float,
        poll_s: float,
    ) -> None:
        self.what, self.log_path, self.deadline_s = what, log_path, deadline_s
        self.patience = Patience(what, grace_s=grace_s, first_pause_s=poll_s, check=self._check)
        self._run, self._on_event, self._poll_s = run, on_event, poll_s
        self._until = float("inf")
        self._lines = AnswerLines()
        self._heard = {"answers.jsonl": 0, "log": 0}

    def follow(self) -> dict[str, Any]:
        """Listen until it has ended; returns exit.json. Raises Cancelled, DeadlineExceeded, HostError; the stage may run on then."""
        self._until = time.monotonic() + self.deadline_s
        while True:
            look = self.patience.call(self._run.look)
            if look.ending is not None:
                self._until = float("inf")
            self._catch_up(look)
            if look.ending is not None:
                return look.ending
            if not look.alive:
                raise HostError(
                    f"{self.what}: its supervisor is gone without a word: the host went down, or all its processes were killed.",
                    "Run again; finished work is kept. If it repeats, see that processes may outlive a login there "
                    f"(`loginctl enable-linger`) and that memory suffices. Log: {self.log_path}",
                )
            pause(self._poll_s, self._check)

    def hear_last_words(self) -> None:
        """The rest of the log of a run that was ended; no more than one try."""
        try:
            while block := self._run.read_block("log", self._heard["log"]):
                self._take("log", block)
        except EvalError as exc:
            log.warning("%s: the end of its log is lost: %s", self.what, exc.problem)

    def read_all(self, read: Callable[[int], bytes]) -> bytes:
        """A whole small file on the host, by a `read` that gives some bytes from an offset; b"" where there is none."""
        content = b""
        while block := self.patience.call(functools.partial(read, len(content))):
            content += block
        return content

    def _catch_up(self, look: Look) -> None:
        for name, size_bytes in (("log", look.log_bytes), ("answers.jsonl", look.answers_bytes)):
            while self._heard[name] < size_bytes:
                block = self.patience.call(functools.partial(self._run.read_block, name, self._heard[name]))
                if not block:
                    break
                self._take(name, block)

    def _take(self, name: str, block: bytes) -> None:
        self._heard[name] += len(block)
        if name == "log":
            self._append(block)
            return
        for event in self._lines.feed(block):
            self._on_event(event)

    def _append(self, block: bytes) -> None:
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as file:
                file.write(block)
        except OSError as exc:
            raise from_os_error(exc, f"writing {self.log_path}") from exc

    def _check(self) -> None:
        if ending():
            raise failures.ended_on_request(self.what)
        if time.monotonic() > self._until:
            raise failures.past_deadline(self.what, self.deadline_s)
