"""One SSH connection a host, shared by all threads: opened when first needed, opened anew by the next call after it broke.

An unreachable host answers at once for a few seconds after each failed attempt, so that asking it about a hundred
artifacts costs one time-out and not a hundred.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import paramiko

from dflash_model.errors import EvalError, HostError
from tasks.remote.chain import open_chain
from tasks.remote.command import run_blindly
from tasks.remote.endpoint import Endpoint
from tasks.remote.ssh_errors import FOREIGN, translate

log = logging.getLogger(__name__)

MAX_CHANNELS = 8
"""On one transport; sshd allows ten sessions a connection (MaxSessions), or what its administrator says."""

MAX_LINES = 4
"""Transports to one host. More than one is needed only by threads that hold a session while they ask for another."""

NEXT_LINE_AFTER_S = 1.0
"""How long to wait for a session on the first transport before another one is opened."""

CHANNEL_WAIT_S = 60.0
TRIES = 3
TRY_AGAIN_WITHIN_S = 3.0
"""Quick failures (sshd busy, a dropped banner) are tried again; whatever took longer than this is not."""

FIRST_HOLD_S = 1.0
LONGEST_HOLD_S = 15.0
FINAL = (paramiko.AuthenticationException, paramiko.BadHostKeyException)
"""Never better at the second try."""


@dataclass(slots=True)
class _Line:
    """One transport, and how many sessions are on it."""

    transport: paramiko.Transport
    closing: ExitStack
    busy: int = 0
    limit: int = MAX_CHANNELS


class Connection:
    """The way to one host. A second transport is opened only while the first one is full of sessions."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._changed = threading.Condition()
        self._lines: list[_Line] = []
        self._failures = 0
        self._held_until = 0.0
        self._last_error: EvalError | None = None
        self._errands: list[str] = []

    @property
    def name(self) -> str:
        """The host's name."""
        return self.endpoint.name

    def transport(self) -> paramiko.Transport:
        """A living transport, opened now if there is none. Raises HostError or InputError."""
        with self._changed:
            self._drop_dead()
            return (self._lines[0] if self._lines else self._add_line()).transport

    @contextmanager
    def channel(self) -> Iterator[paramiko.Channel]:
        """A new session channel, closed at the end. Raises HostError."""
        line, channel = self._session()
        try:
            yield channel
        finally:
            with contextlib.suppress(*FOREIGN):
                channel.close()
            self._release(line)

    @property
    def is_alive(self) -> bool:
        """True while a transport is open; False says nothing about the host."""
        return any(line.transport.is_active() for line in self._lines)

    def later(self, script: str) -> None:
        """Run a short script as soon as the host is reached again, before anything else: to clear up after a cut link."""
        with self._changed:
            self._errands.append(script)

    def close(self) -> None:
        """End the connection; a later call opens a new one."""
        with self._changed:
            lines, self._lines = self._lines, []
            for line in lines:
                _close(line)

    def _session(self) -> tuple[_Line, paramiko.Channel]:
        """A session: on a line with room, or on a new one where the line turns out to be dead, or sshd to allow fewer."""
        while True:
            line, is_new = self._reserve()
            try:
                return line, line.transport.open_session(timeout=self.endpoint.timeouts.channel)
            except FOREIGN as exc:
                alive = line.transport.is_active()
                # Of two threads that are refused at once, one gets ChannelException and the other a bare SSHException.
                refused = isinstance(exc, paramiko.SSHException) and "Timeout" not in str(exc)
                full = alive and refused and self._lower_limit(line)
                dead = not alive and not is_new
                self._release(line)
                if not full and not dead:
                    raise translate(exc, host=self.name, doing="opening a session") from exc

    def _reserve(self) -> tuple[_Line, bool]:
        """(a line with room, whether it was opened for this). Raises HostError."""
        began = time.monotonic()
        with self._changed:
            while True:
                self._drop_dead()
                line = next((line for line in self._lines if line.busy < line.limit), None)
                waited_s = time.monotonic() - began
                is_new = line is None and (not self._lines or (waited_s > NEXT_LINE_AFTER_S and len(self._lines) < MAX_LINES))
                if is_new:
                    line = self._add_line()
                if line is not None:
                    line.busy += 1
                    return line, is_new
                self._changed.wait(NEXT_LINE_AFTER_S)
                if waited_s > CHANNEL_WAIT_S:
                    raise HostError(
                        f"[{self.name}] all its {sum(line.limit for line in self._lines)} sessions were busy for {CHANNEL_WAIT_S:.0f} s.",
                        "Run fewer things at a time on that host.",
                    )

    def _release(self, line: _Line) -> None:
        with self._changed:
            line.busy -= 1
            self._changed.notify()

    def _lower_limit(self, line: _Line) -> bool:
        """sshd refused one more session (MaxSessions): remember how many it takes. False where it takes none at all."""
        with self._changed:
            line.limit = max(1, line.busy - 1)
            return line.busy > 1

    def _add_line(self) -> _Line:
        """Open a transport, unless the last attempt has just failed."""
        if self._last_error is not None and time.monotonic() < self._held_until:
            raise type(self._last_error)(self._last_error.problem, self._last_error.fix)
        try:
            line = self._open()
        except EvalError as exc:
            hold_s = min(LONGEST_HOLD_S, FIRST_HOLD_S * 2**self._failures) * random.uniform(0.5, 1.0)
            self._failures = min(self._failures + 1, 10)
            self._held_until = time.monotonic() + hold_s
            self._last_error = exc
            raise
        self._failures, self._last_error = 0, None
        self._lines.append(line)
        self._run_errands(line)
        return line

    def _run_errands(self, line: _Line) -> None:
        """Each is tried once: what it clears up is only in the way of space and tidiness."""
        errands, self._errands = self._errands, []
        limit_s = self.endpoint.timeouts.channel
        for script in errands:
            log.info("[%s] clearing up after a cut link", self.name)
            with contextlib.suppress(*FOREIGN):
                channel = line.transport.open_session(timeout=limit_s)
                try:
                    run_blindly(channel, script, timeout_s=limit_s)
                finally:
                    channel.close()

    def _open(self) -> _Line:
        """Connect through all hops; failures that came quickly are tried again."""
        began = time.monotonic()
        for attempt in range(1, TRIES + 1):
            try:
                line = _Line(*open_chain(self.endpoint))
            except FOREIGN as exc:
                took_s = time.monotonic() - began
                if attempt == TRIES or took_s > TRY_AGAIN_WITHIN_S or isinstance(exc, FINAL):
                    raise translate(exc, host=self.name, doing=f"connecting to {self.endpoint.address}") from exc
                log.info("[%s] attempt %d to connect failed: %s", self.name, attempt, exc)
                time.sleep(random.uniform(0.1, 0.3) * 2**attempt)
                continue
            log.info("[%s] connected to %s", self.name, self.endpoint.address)
            return line
        raise AssertionError("the loop returns or raises")

    def _drop_dead(self) -> None:
        for line in [line for line in self._lines if not line.transport.is_active()]:
            self._lines.remove(line)
            _close(line)


def _close(line: _Line) -> None:
    with contextlib.suppress(*FOREIGN):
        line.closing.close()
