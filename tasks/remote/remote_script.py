"""One POSIX sh script running on a host, its input and output as streams.

The login shell may print whatever it likes before our script begins: so output counts from a random marker on. And an SSH
channel has one window for both streams: so both are always drained.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import paramiko

from dflash_model.errors import EvalError, HostError
from tasks.remote.chain import WINDOW_BYTES
from tasks.remote.command import command_line, kill_script, run_blindly
from tasks.remote.connection import Connection
from tasks.remote.ssh_errors import AGAIN, FOREIGN, translated

POLL_S = 0.2
EXIT_WAIT_S = 10.0
LINK_WAIT_S = 0.4
SEND_BYTES = (32 << 10) - 64
"""What sshd takes in one packet; more would be cut in two."""

KEPT_NOISE_BYTES = 4096


class RemoteScript:
    """A running script."""

    def __init__(
        self, connection: Connection, channel: paramiko.Channel, script: str | None, *, doing: str, keep_bytes: int
    ) -> None:
        """Start `script` on `channel`; None: sshd's SFTP subsystem instead, which has no marker. Raises HostError."""
        self.pid: int | None = None
        self._connection = connection
        self._channel = channel
        self._host = connection.name
        self._doing = doing
        self._keep_bytes = keep_bytes
        self._marker = secrets.token_hex(16).encode()
        self._token = secrets.token_hex(8)
        self._noise, self._err = bytearray(), bytearray()
        self._marked_err = False
        self._until: float | None = None
        self._moved_at = time.monotonic()
        self._deaf = False
        self._finished = self._spared = False
        with translated(self._host, doing):
            if script is None:
                channel.invoke_subsystem("sftp")
                self.pid, self._spared = 0, True
            else:
                channel.exec_command(command_line(script, marker=self._marker.decode(), token=self._token))

    @property
    def stderr(self) -> bytes:
        """What came on stderr so far, at most the last `keep_bytes`."""
        return bytes(self._err) if self._marked_err else b""

    @property
    def is_open(self) -> bool:
        """False once the other side has ended, or the link has."""
        return not (self._channel.closed or self._channel.eof_received)

    def allow(self, seconds: float | None) -> None:
        """From now on the script may take `seconds`, silent or not; None: for as long as it does not stall."""
        self._until = None if seconds is None else time.monotonic() + seconds
        self._moved_at = time.monotonic()

    def receive(self, wait_s: float) -> bytes | None:
        """What stdout has within `wait_s`: bytes, b"" at its end, None where nothing came. Raises HostError."""
        self._check_time()
        with translated(self._host, self._doing):
            self._drain_stderr()
            self._channel.settimeout(wait_s)
            try:
                block = self._channel.recv(WINDOW_BYTES)
            except TimeoutError:
                return None
            self._drain_stderr()
        self._moved_at = time.monotonic()
        if self.pid is not None:
            return block
        if not block:
            raise self._never_started()
        return self._after_marker(block)

    def read(self) -> bytes:
        """The next bytes of stdout, b"" at its end. Raises HostError where the link is cut, stalls, or time is up."""
        while (block := self.receive(POLL_S)) is None:
            pass
        return block

    def send(self, block: bytes) -> int:
        """Send some of `block` to stdin, waiting a moment at most; returns how much, -1 once nobody reads it any more."""
        if self._deaf or self._channel.exit_status_ready():
            return -1
        self._channel.settimeout(POLL_S)
        try:
            sent = self._channel.send(block[:SEND_BYTES])
        except TimeoutError:
            return 0
        except FOREIGN:  # closed by the other side, or the link is gone: finish() tells which
            self._deaf = True
            return -1
        self._moved_at = time.monotonic()
        return sent

    def write(self, block: bytes) -> bool:
        """Send all of `block` to stdin; False once nobody reads it any more. Raises HostError where nothing moves."""
        for begin in range(0, len(block), SEND_BYTES):
            part = block[begin : begin + SEND_BYTES]
            while part:
                sent = self.send(part)
                if sent < 0:
                    return False
                if sent == 0:
                    with translated(self._host, self._doing):
                        self._drain_stderr()
                    self._check_time()
                part = part[sent:]
        return True

    @property
    def can_send(self) -> bool:
        """True where `send` will not have to wait for the other side."""
        return self._channel.send_ready()

    def close_stdin(self) -> None:
        """End of input."""
        with contextlib.suppress(*FOREIGN):
            self._channel.shutdown_write()

    def finish(self) -> int:
        """The exit code, once stdout has ended; -1 for a script ended by a signal. Raises HostError where the link was cut."""
        until = time.monotonic() + EXIT_WAIT_S
        while not self._channel.exit_status_ready():
            if time.monotonic() > until:
                raise HostError(f"[{self._host}] no exit status came while {self._doing}.", AGAIN)
            time.sleep(0.005)
        with translated(self._host, self._doing):
            self._drain_stderr()
        code = self._channel.exit_status
        if code == -1:
            self._refuse_cut_link()
        self._finished = True
        return code

    def spare(self) -> None:
        """It need not be killed at the end: it ends by itself when its input does."""
        self._spared = True

    def end(self) -> None:
        """Kill the script and all it started, if it still runs; where the link is gone, as soon as it is there again."""
        if self._finished or self.pid == 0 or self._channel.exit_status != -1:
            return
        script = kill_script(self.pid, token=self._token)
        if self._link_is_gone():
            self._connection.later(script)
        elif not (self._spared or self._channel.closed):
            with contextlib.suppress(EvalError, *FOREIGN), self._connection.channel() as channel:
                run_blindly(channel, script, timeout_s=self._connection.endpoint.timeouts.channel)

    def _after_marker(self, block: bytes) -> bytes | None:
        """What of the output so far is the script's own, None before the marker's line is complete."""
        self._noise += block
        at = self._noise.find(self._marker)
        end = self._noise.find(b"\n", at) if at >= 0 else -1
        if end < 0:
            if at < 0:
                del self._noise[:-KEPT_NOISE_BYTES]
            return None
        self.pid = int(self._noise[at + len(self._marker) : end])
        return bytes(self._noise[end + 1 :]) or None

    def _drain_stderr(self) -> None:
        while self._channel.recv_stderr_ready():
            block = self._channel.recv_stderr(WINDOW_BYTES)
            if not block:
                return
            self._err += block
            at = -1 if self._marked_err else self._err.find(self._marker + b"\n")
            if at >= 0:
                self._marked_err = True
                del self._err[: at + len(self._marker) + 1]
            del self._err[: -self._keep_bytes]

    def _check_time(self) -> None:
        now = time.monotonic()
        if self._until is not None and now > self._until:
            raise HostError(f"[{self._host}] time is up while {self._doing}.", "Look at the load of that host, then run again.")
        stall_s = self._connection.endpoint.timeouts.stall
        if self._until is None and now - self._moved_at > stall_s:
            raise HostError(f"[{self._host}] nothing has moved for {stall_s:g} s while {self._doing}.", AGAIN)

    def _refuse_cut_link(self) -> None:
        """Raise HostError if there is no exit status because the link is gone."""
        if self._link_is_gone():
            raise HostError(f"[{self._host}] the connection was cut while {self._doing}.", AGAIN)

    def _link_is_gone(self) -> bool:
        """paramiko closes the channels a moment before it says that the transport has ended, so that gets a moment."""
        transport = self._channel.get_transport()
        until = time.monotonic() + LINK_WAIT_S
        while transport.is_active() and self._channel.closed and time.monotonic() < until:
            time.sleep(0.01)
        return not transport.is_active()

    def _never_started(self) -> EvalError:
        if self._channel.exit_status == -1:
            self._refuse_cut_link()
        said = bytes(self._noise + self._err).decode("utf-8", "replace").strip()
        return HostError(
            f"[{self._host}] the login shell ended before our script began, while {self._doing}"
            + (f"; it said: {said[-300:]}" if said else "") + ".",
            f"Let the profile of {self._connection.endpoint.user} there (~/.bashrc) neither exit nor exec when it is not interactive.",
        )  # fmt: skip


@contextmanager
def remote_script(
    connection: Connection, script: str | None, *, doing: str, timeout_s: float | None = None, keep_bytes: int = 64 << 10
) -> Iterator[RemoteScript]:
    """Run `script` (None: the SFTP subsystem) for the body's duration; whatever of it is left then is killed.

    `timeout_s`: when it must have ended; None: as long as bytes move. Raises HostError.
    """
    with connection.channel() as channel:
        running = RemoteScript(connection, channel, script, doing=doing, keep_bytes=keep_bytes)
        running.allow(timeout_s)
        try:
            yield running
        finally:
            running.end()
