"""Connections that do not come about, without any sshd: what is said, how often it is tried, how long it is left alone."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_model.errors import HostError
from tasks.remote.connection import TRIES, Connection
from tasks.remote.endpoint import Endpoint, Timeouts
from tasks.remote.ssh_shell import SshShell


def endpoint(port: int, *, hostname: str = "127.0.0.1", **limits: float) -> Endpoint:
    timeouts = Timeouts(**({"connect": 1.0, "banner": 0.5, "auth": 1.0, "channel": 1.0, "io": 1.0, "keepalive": 1.0} | limits))
    return Endpoint(name="gpu", hostname=hostname, port=port, user="u", key=Path("/none"), known_hosts=(), timeouts=timeouts)


class Impostor:
    """Takes connections and says what it is told to say; counts them."""

    def __init__(self, says: bytes) -> None:
        self.count = 0
        self._says = says
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                taken, _ = self._server.accept()
            except OSError:
                return
            self.count += 1
            if self._says:
                taken.sendall(self._says)
                taken.close()
            else:
                self._taken.append(taken)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for taken in self._taken:
            taken.close()
        self._thread.join(timeout=5)


@pytest.fixture
def no_ssh() -> Iterator[Impostor]:
    impostor = Impostor(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    yield impostor
    impostor.close()


@pytest.fixture
def mute() -> Iterator[Impostor]:
    impostor = Impostor(b"")
    yield impostor
    impostor.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_closed_port_is_a_sentence() -> None:
    with pytest.raises(
        HostError, match=r"^\[gpu\] nothing listens at that address and port while connecting to u@127.0.0.1:"
    ) as caught:
        Connection(endpoint(free_port())).transport()
    assert "sshd" in caught.value.fix


def test_an_unknown_name_is_a_sentence() -> None:
    with pytest.raises(HostError, match=r"^\[gpu\] the host name is not known while connecting to u@no-such-host.invalid"):
        SshShell(Connection(endpoint(22, hostname="no-such-host.invalid"))).run("true", timeout_s=5)


def test_quick_failures_are_tried_again_and_then_the_host_is_left_alone_for_a_moment(no_ssh: Impostor) -> None:
    connection = Connection(endpoint(no_ssh.port))
    with pytest.raises(HostError, match=r"\[gpu\] the SSH connection failed while connecting") as first:
        connection.transport()
    assert no_ssh.count == TRIES
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(HostError) as again:
            connection.transport()
    assert str(again.value) == str(first.value)
    assert again.value is not first.value, "an exception that is raised twice grows a traceback"
    assert no_ssh.count == TRIES, "nobody knocked"
    assert time.monotonic() - began < 0.5
    time.sleep(1.05 - (time.monotonic() - began))
    with pytest.raises(HostError):
        connection.transport()
    assert no_ssh.count == 2 * TRIES, "the moment is over"


def test_a_server_that_says_nothing_is_waited_for_as_long_as_allowed(mute: Impostor) -> None:
    began = time.monotonic()
    with pytest.raises(HostError, match=r"\[gpu\] .* while connecting to"):
        Connection(endpoint(mute.port, banner=1.6)).transport()
    assert 1.5 < time.monotonic() - began < 5
    assert mute.count <= 2, "slow failures are not tried again and again"


def test_threads_that_find_a_host_down_wait_for_one_attempt_together(mute: Impostor) -> None:
    connection = Connection(endpoint(mute.port, banner=1.6))
    failures: list[HostError] = []

    def ask() -> None:
        try:
            connection.transport()
        except HostError as exc:
            failures.append(exc)

    began = time.monotonic()
    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 10
    assert time.monotonic() - began < 6
    assert mute.count <= 2
