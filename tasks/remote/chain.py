"""The way to a host, hop by hop: reach it, agree on keys, check the host key, log in; then the next one through it.

No key is ever trusted here. `find_untrusted` only tells what `dflash-eval hosts trust` would have to add.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack
from dataclasses import dataclass

import paramiko

from dflash_model.errors import HostError
from tasks.remote.credentials import log_in
from tasks.remote.endpoint import Endpoint
from tasks.remote.known_hosts import KnownHosts, Verdict, known_hosts_line, refusal
from tasks.remote.ssh_errors import translated
from tasks.remote.wire import Watch, Wire, open_socket, open_through

WINDOW_BYTES = 8 << 20
PACKET_BYTES = 256 << 10
GCM = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
"""paramiko lists them last, though they cost half of what CTR with HMAC costs."""

WIRE_LOG = "tasks.remote.wire.paramiko"


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
