"""One SSH connection a host, shared by all threads: opened when first needed, opened anew by the next call after it broke.

An unreachable host answers at once for a few seconds after each failed attempt, so that asking it about a hundred
artifacts costs one time-out and not a hundred.
"""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import paramiko

from dflash_model.errors import EvalError, HostError
from tasks.remote.credentials import log_in
from tasks.remote.endpoint import Endpoint
from tasks.remote.known_hosts import KnownHosts, Verdict, known_hosts_line, refusal
from tasks.remote.ssh_errors import FOREIGN, translate, translated
from tasks.remote.wire import Watch, Wire, open_socket, open_through

log = logging.getLogger(__name__)

WINDOW_BYTES = 8 << 20
PACKET_BYTES = 256 << 10
GCM = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
"""paramiko lists them last, though they cost half of what CTR with HMAC costs."""

MAX_CHANNELS = 8
"""At a time; sshd allows ten sessions a connection (MaxSessions)."""

CHANNEL_WAIT_S = 60.0
TRIES = 3
TRY_AGAIN_WITHIN_S = 3.0
"""Quick failures (sshd busy, a dropped banner) are tried again; whatever took longer than this is not."""

FIRST_HOLD_S = 1.0
LONGEST_HOLD_S = 15.0
WIRE_LOG = "tasks.remote.wire.paramiko"
_FINAL = (paramiko.AuthenticationException, paramiko.BadHostKeyException)


@dataclass(frozen=True, kw_only=True, slots=True)
class Untrusted:
    """A host of a chain whose key is not known."""

    hostname: str
    """How known_hosts calls it."""

    verdict: Verdict
    """Why it is not accepted."""

    fingerprint: str
    """"<type> SHA256:..." of the offered key, for a person to compare."""

    line: str
    """The known_hosts line that would make it known."""


class Connection:
    """The way to one host."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._channels = threading.BoundedSemaphore(MAX_CHANNELS)
        self._transport: paramiko.Transport | None = None
        self._opened = ExitStack()
        self._failures = 0
        self._held_until = 0.0
        self._last_error: EvalError | None = None

    @property
    def name(self) -> str:
        """The host's name."""
        return self.endpoint.name

    def transport(self) -> paramiko.Transport:
        """The living transport, opened now if there is none. Raises HostError or InputError."""
        with self._lock:
            if self._transport is not None and self._transport.is_active():
                return self._transport
            self._drop()
            if self._last_error is not None and time.monotonic() < self._held_until:
                raise type(self._last_error)(self._last_error.problem, self._last_error.fix)
            try:
                self._transport = self._open()
            except EvalError as exc:
                hold_s = min(LONGEST_HOLD_S, FIRST_HOLD_S * 2**self._failures) * random.uniform(0.5, 1.0)
                self._failures = min(self._failures + 1, 10)
                self._held_until = time.monotonic() + hold_s
                self._last_error = exc
                raise
            self._failures, self._last_error = 0, None
            return self._transport

    @contextmanager
    def channel(self) -> Iterator[paramiko.Channel]:
        """A new session channel, closed at the end. Raises HostError."""
        if not self._channels.acquire(timeout=CHANNEL_WAIT_S):
            raise HostError(
                f"[{self.name}] {MAX_CHANNELS} sessions have been busy there for {CHANNEL_WAIT_S:.0f} s.",
                "Run fewer things at a time on that host.",
            )
        try:
            channel = self._session()
            try:
                yield channel
            finally:
                with contextlib.suppress(*FOREIGN):
                    channel.close()
        finally:
            self._channels.release()

    def close(self) -> None:
        """End the connection; a later call opens a new one."""
        with self._lock:
            self._drop()

    def _session(self) -> paramiko.Channel:
        """A session on the shared connection, or, where that turns out to be dead, on a new one."""
        before = self._transport
        while True:
            transport = self.transport()
            try:
                return transport.open_session(timeout=self.endpoint.timeouts.channel)
            except FOREIGN as exc:
                if transport is before and not transport.is_active():
                    before = None
                    continue
                raise translate(exc, host=self.name, doing="opening a session") from exc

    def _open(self) -> paramiko.Transport:
        """Connect through all hops; failures that came quickly are tried again."""
        began = time.monotonic()
        for attempt in range(1, TRIES + 1):
            try:
                transport, opened = open_chain(self.endpoint)
            except FOREIGN as exc:
                took_s = time.monotonic() - began
                if attempt == TRIES or took_s > TRY_AGAIN_WITHIN_S or isinstance(exc, _FINAL):
                    raise translate(exc, host=self.name, doing=f"connecting to {self.endpoint.address}") from exc
                log.info("[%s] attempt %d to connect failed: %s", self.name, attempt, exc)
                time.sleep(random.uniform(0.1, 0.3) * 2**attempt)
                continue
            self._opened = opened
            log.info("[%s] connected to %s", self.name, self.endpoint.address)
            return transport
        raise AssertionError("the loop returns or raises")

    def _drop(self) -> None:
        self._transport = None
        opened, self._opened = self._opened, ExitStack()
        with contextlib.suppress(*FOREIGN):
            opened.close()


def open_chain(endpoint: Endpoint) -> tuple[paramiko.Transport, ExitStack]:
    """Connect and log in through every jump host; the stack closes it all. Raises EvalError, and paramiko's errors."""
    with ExitStack() as stack:
        transport: paramiko.Transport | None = None
        for hop in (*endpoint.jumps, endpoint):
            wire, transport = _negotiate(hop, transport, stack)
            known = KnownHosts.read(hop.known_hosts, host=hop.name)
            key = transport.get_remote_server_key()
            verdict = known.verdict(hop, key)
            if verdict is not Verdict.KNOWN:
                raise refusal(verdict, hop, key, known)
            log_in(transport, hop)
        assert transport is not None
        watch = Watch(transport, wire, host=endpoint.name, timeouts=endpoint.timeouts)
        watch.start()
        stack.callback(watch.end)
        return transport, stack.pop_all()


def find_untrusted(endpoint: Endpoint) -> Untrusted | None:
    """The first host of the chain whose key is not known, None where all are. Logs in to the jump hosts before it only.

    Raises EvalError.
    """
    doing = f"asking {endpoint.address} for its host key"
    with ExitStack() as stack, translated(endpoint.name, doing):
        transport: paramiko.Transport | None = None
        for hop in (*endpoint.jumps, endpoint):
            _, transport = _negotiate(hop, transport, stack)
            key = transport.get_remote_server_key()
            verdict = KnownHosts.read(hop.known_hosts, host=hop.name).verdict(hop, key)
            if verdict is not Verdict.KNOWN:
                return Untrusted(
                    hostname=hop.known_as,
                    verdict=verdict,
                    fingerprint=f"{key.get_name()} {key.fingerprint}",
                    line=known_hosts_line(hop, key),
                )
            if hop is not endpoint:
                log_in(transport, hop)
    return None


def _negotiate(hop: Endpoint, through: paramiko.Transport | None, stack: ExitStack) -> tuple[Wire, paramiko.Transport]:
    """Reach `hop`, agree on keys; the host key is not checked yet. Raises paramiko's errors and EvalError."""
    wire = Wire(_reach(hop, through))
    stack.callback(wire.cut)
    transport = paramiko.Transport(
        wire,  # type: ignore[arg-type]
        default_window_size=WINDOW_BYTES,
        default_max_packet_size=PACKET_BYTES,
    )
    _hush(transport)
    transport.banner_timeout = transport.handshake_timeout = hop.timeouts.banner
    transport.channel_timeout = hop.timeouts.channel
    options = transport.get_security_options()
    options.ciphers = (*GCM, *(name for name in options.ciphers if name not in GCM))
    options.key_types = KnownHosts.read(hop.known_hosts, host=hop.name).preferred(hop, options.key_types)
    done = threading.Event()
    transport.start_client(event=done)
    stack.callback(transport.close)
    # start_client's own time-out returns as if all were well, hence the event.
    if not done.wait(2 * hop.timeouts.banner):
        raise TimeoutError("no key exchange")
    if not transport.is_active():
        raise transport.get_exception() or paramiko.SSHException("the negotiation failed")
    return wire, transport


def _reach(hop: Endpoint, through: paramiko.Transport | None) -> socket.socket | paramiko.Channel:
    if through is None:
        return open_socket(hop)
    try:
        return open_through(through, hop)
    except paramiko.ChannelException as exc:
        raise HostError(
            f"[{hop.name}] the jump host opened no connection to {hop.hostname}:{hop.port}: {exc.text}.",
            "Check that address from the jump host, and that its sshd has AllowTcpForwarding.",
        ) from exc


def _hush(transport: paramiko.Transport) -> None:
    """paramiko logs a traceback for every failure that we turn into a sentence; whoever sets this logger's level sees them."""
    transport.set_log_channel(WIRE_LOG)
    logger = logging.getLogger(WIRE_LOG)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.CRITICAL)
