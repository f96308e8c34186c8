"""The wire below a connection: what the kernel is told, and the watch that cuts a silent one."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from namespaces import soon

from tasks.remote.endpoint import Endpoint, Timeouts
from tasks.remote.wire import Watch, Wire, open_socket

LIMITS = Timeouts(keepalive=0.2, io=0.6)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


class Peer:
    """A transport whose other side answers keepalives, or does not."""

    def __init__(self, theirs: socket.socket, *, answers: bool) -> None:
        self.asked = 0
        self.active = True
        self._theirs = theirs
        self._answers = answers

    def is_active(self) -> bool:
        return self.active

    def global_request(self, _kind: str, wait: bool) -> None:
        assert wait, "a request that wants no answer proves nothing"
        self.asked += 1
        if self._answers:
            self._theirs.send(b"answer")


def listen(wire: Wire, heard: list[bytes]) -> threading.Thread:
    def run() -> None:
        try:
            while data := wire.recv(100):
                heard.append(data)
        except OSError:
            return

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_the_kernel_is_told_to_notice_a_dead_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint(
            name="h", hostname="127.0.0.1", port=server.getsockname()[1], user="u", key=None, known_hosts=(),
            timeouts=Timeouts(io=12, keepalive=7),
        )  # fmt: skip
        with open_socket(endpoint) as opened:
            tcp = socket.IPPROTO_TCP
            assert opened.getsockopt(tcp, socket.TCP_NODELAY)
            assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            told = [
                opened.getsockopt(tcp, getattr(socket, f"TCP_{name}"))
                for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
            ]
            assert told == [7, 4, 3, 12_000]


def test_a_silent_peer_is_cut_off_in_time(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    wire, heard = Wire(ours), list[bytes]()
    listener = listen(wire, heard)
    peer = Peer(theirs, answers=False)
    began = time.monotonic()
    Watch(peer, wire, host="h", timeouts=LIMITS).start()  # type: ignore[arg-type]
    listener.join(timeout=5)
    took_s = time.monotonic() - began
    assert not listener.is_alive(), "a reader that was blocked is set free"
    assert LIMITS.keepalive + LIMITS.io <= took_s < LIMITS.keepalive + LIMITS.io + 1
    assert peer.asked == 1
    assert soon(lambda: wire._closed, 2)


def test_a_peer_that_answers_is_asked_only_when_silent_and_never_cut(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    wire, heard = Wire(ours), list[bytes]()
    listener = listen(wire, heard)
    peer = Peer(theirs, answers=True)
    watch = Watch(peer, wire, host="h", timeouts=LIMITS)  # type: ignore[arg-type]
    watch.start()
    time.sleep(1.5)
    assert not wire._closed
    assert 2 <= peer.asked <= 8
    asked = peer.asked
    for _ in range(12):
        theirs.send(b"data")
        time.sleep(0.05)
    assert peer.asked - asked <= 1, "who talks is not asked"
    watch.end()
    peer.active = False
    wire.cut()
    listener.join(timeout=5)
    assert not listener.is_alive()
