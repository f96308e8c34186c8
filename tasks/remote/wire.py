"""What lies below a paramiko Transport: a TCP socket of our own or a channel through a jump host, and the watch over it.

paramiko sends keepalives but never looks for an answer, and a write to a dead peer is tried again for ever. So the watch
asks with a request that must be answered, and cuts the wire when nothing at all has been heard for too long.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time

import paramiko

from tasks.remote.endpoint import Endpoint, Timeouts
from tasks.remote.ssh_errors import FOREIGN

log = logging.getLogger(__name__)

POLL_S = 0.2


class Wire:
    """The part of a socket that a Transport uses; remembers when it last heard something."""

    def __init__(self, inner: socket.socket | paramiko.Channel) -> None:
        self._inner = inner
        self.heard_at = time.monotonic()

    def recv(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        data = self._inner.recv(size)
        if data:
            self.heard_at = time.monotonic()
        return data

    def send(self, data: bytes) -> int:
        """Send some of `data`; returns how much."""
        return self._inner.send(data)

    def settimeout(self, timeout: float) -> None:
        """As a socket's."""
        self._inner.settimeout(timeout)

    def getpeername(self) -> object:
        """As a socket's."""
        return self._inner.getpeername()

    def close(self) -> None:
        """As a socket's."""
        self._inner.close()

    @property
    def _closed(self) -> bool:
        """Transport.stop_thread looks at this private name of sockets; Channel has it for the same reason."""
        return bool(self._inner._closed)  # type: ignore[union-attr]

    def cut(self) -> None:
        """End it at once, whoever is reading or writing."""
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(*FOREIGN):
            self._inner.close()


def open_socket(endpoint: Endpoint) -> socket.socket:
    """A TCP connection whose kernel notices a dead peer by itself. Raises OSError."""
    limits = endpoint.timeouts
    opened = socket.create_connection((endpoint.hostname, endpoint.port), timeout=limits.connect)
    tcp = socket.IPPROTO_TCP
    try:
        opened.setsockopt(tcp, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", max(1, round(limits.keepalive))),
            ("TCP_KEEPINTVL", max(1, round(limits.io / 3))),
            ("TCP_KEEPCNT", 3),
            ("TCP_USER_TIMEOUT", round(limits.io * 1000)),
        ):
            if hasattr(socket, name):  # Linux has all four
                opened.setsockopt(tcp, getattr(socket, name), value)
    except OSError:
        opened.close()
        raise
    return opened


def open_through(transport: paramiko.Transport, endpoint: Endpoint) -> paramiko.Channel:
    """A connection to `endpoint` made by the host at the other end of `transport`. Raises paramiko's errors."""
    return transport.open_channel(
        "direct-tcpip",
        dest_addr=(endpoint.hostname, endpoint.port),
        src_addr=("127.0.0.1", 0),
        timeout=endpoint.timeouts.channel,
    )


class Watch:
    """A thread that cuts the wire of a silent host: at most `keepalive` + `io` seconds after it fell silent."""

    def __init__(self, transport: paramiko.Transport, wire: Wire, *, host: str, timeouts: Timeouts) -> None:
        self._transport = transport
        self._wire = wire
        self._host = host
        self._limits = timeouts
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch {host}", daemon=True)

    def start(self) -> None:
        """Begin to watch; ends with the transport."""
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(min(self._limits.keepalive, 1.0)):
            if not self._transport.is_active():
                return
            if time.monotonic() - self._wire.heard_at < self._limits.keepalive:
                continue
            asked_at = time.monotonic()
            threading.Thread(target=self._ask, name=f"keepalive {self._host}", daemon=True).start()
            if not self._heard_since(asked_at):
                log.warning("[%s] nothing heard for %g s, the connection is cut", self._host, self._limits.io)
                self._wire.cut()
                return

    def _ask(self) -> None:
        """A request that every sshd must answer. Returns with the answer, or when the transport ends."""
        with contextlib.suppress(*FOREIGN):
            self._transport.global_request("keepalive@openssh.com", wait=True)

    def _heard_since(self, asked_at: float) -> bool:
        while time.monotonic() - asked_at < self._limits.io:
            if self._wire.heard_at >= asked_at or not self._transport.is_active():
                return True
            if self._ended.wait(POLL_S):
                return True
        return False
