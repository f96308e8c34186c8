"""Links that are cut, daemons that die or freeze, disks that are full: noticed in time, said in a sentence, over at the next call."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

import pytest
from namespaces import soon

from dflash_model.errors import EvalError, HostError, StorageError
from tasks.remote.ssh_host import SshHost
from tasks.remote.ssh_shell import SshShell
from tasks.remote.transfer import copy_file
from tests.lab_hosts import NOTICED_S, LabHosts, NoRunner

pytestmark = pytest.mark.lab

ENDLESS = 1 << 40


class InThread:
    """An action that runs while the test breaks something, and how it ended."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.error: EvalError | None = None
        self.ended_at = 0.0
        self._action = action
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._action()
        except EvalError as exc:
            self.error = exc
        self.ended_at = time.monotonic()

    def join(self) -> None:
        """Wait for the end; a test that hangs is a failure."""
        self._thread.join(timeout=30)
        assert not self._thread.is_alive(), "it hangs"


class Flow:
    """Blocks without end that tell how many have gone."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[bytes]:
        while True:
            self.count += 1
            yield bytes(1 << 16)


def endless_file(lab_hosts: LabHosts, name: str) -> PurePosixPath:
    """A sparse file that takes longer to read than any test lasts."""
    path = lab_hosts.put(name, "endless", b"")
    os.truncate(lab_hosts.on_disk(name, path), ENDLESS)
    return path


def start(lab_hosts: LabHosts, what: str) -> tuple[SshHost, InThread]:
    """A transfer or a silent script on gpu-a that goes on until something breaks."""
    connection = lab_hosts.connection("gpu-a")
    host = SshHost(connection, PurePosixPath(lab_hosts.lab.work), runner=NoRunner())
    if what == "reading":
        path, seen = endless_file(lab_hosts, "gpu-a"), Flow()

        def read() -> None:
            for _ in host.read_blocks(path):
                seen.count += 1

        running = InThread(read)
        assert soon(lambda: seen.count > 20)
    elif what == "writing":
        flow = Flow()
        running = InThread(lambda: host.write_blocks(host.work_dir / "f", flow))
        assert soon(lambda: flow.count > 20)
    else:
        shell = SshShell(connection)
        running = InThread(lambda: shell.run("echo begun; sleep 100", timeout_s=100))
        assert soon(lambda: any("sleep 100" in line for line in lab_hosts.lab.processes("gpu-a").values()))
    return host, running


@pytest.mark.parametrize("what", ["reading", "writing", "waiting"])
def test_a_cut_link_is_noticed_in_time_and_the_next_call_connects_anew(lab_hosts: LabHosts, what: str) -> None:
    host, running = start(lab_hosts, what)
    cut_at = time.monotonic()
    lab_hosts.lab.cut_link("gpu-a")
    try:
        running.join()
    finally:
        lab_hosts.lab.mend_link("gpu-a")
    assert running.error is not None
    assert type(running.error) is HostError
    assert running.error.problem.startswith("[gpu-a] ")
    assert 1 < running.ended_at - cut_at < NOTICED_S
    assert host.free_bytes() > 0
    assert host.stat(host.work_dir / "f") is None, "what the cut left is removed with the first call that gets through"
    assert "sleep 100" not in str(lab_hosts.lab.processes("gpu-a")), "and what went on running is killed"


@pytest.mark.parametrize("what", ["reading", "writing", "waiting"])
def test_a_frozen_sshd_is_noticed_although_the_kernel_still_acknowledges(lab_hosts: LabHosts, what: str) -> None:
    host, running = start(lab_hosts, what)
    frozen = lab_hosts.sessions("gpu-a")
    assert frozen
    began = time.monotonic()
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    try:
        running.join()
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
    assert type(running.error) is HostError
    assert running.ended_at - began < NOTICED_S
    assert host.free_bytes() > 0


@pytest.mark.parametrize("what", ["reading", "writing", "waiting"])
def test_a_killed_sshd_session_ends_the_call_at_once(lab_hosts: LabHosts, what: str) -> None:
    host, running = start(lab_hosts, what)
    began = time.monotonic()
    for pid in lab_hosts.sessions("gpu-a"):
        os.kill(pid, signal.SIGKILL)
    running.join()
    assert type(running.error) is HostError
    assert running.error.problem.startswith("[gpu-a] ")
    assert running.ended_at - began < 1.5
    assert host.free_bytes() > 0
    assert host.stat(host.work_dir / "f") is None
    assert "sleep 100" not in str(lab_hosts.lab.processes("gpu-a")), "sshd was gone and told it nothing"


def test_a_power_cut_is_noticed_and_the_restarted_host_is_used_again(lab_hosts: LabHosts) -> None:
    host, running = start(lab_hosts, "writing")
    cut_at = time.monotonic()
    lab_hosts.lab.kill("gpu-a")
    running.join()
    assert type(running.error) is HostError
    assert running.ended_at - cut_at < NOTICED_S
    lab_hosts.lab.restart("gpu-a")

    def answers() -> bool:
        try:
            return host.free_bytes() > 0
        except HostError:
            return False

    assert soon(answers, 5)
    assert host.stat(host.work_dir / "f") is None, "half a file survived on the disk, and is removed"


def test_a_full_disk_is_a_sentence_and_leaves_nothing(lab_hosts: LabHosts) -> None:
    lab_hosts.lab.restart("eval", work_mib=8)
    try:
        host = lab_hosts.host("eval")
        assert host.free_bytes() == 8 << 20
        with pytest.raises(StorageError, match=r"\[eval\] no space is left on the disk while writing .*No space left on device"):
            host.write_blocks(host.work_dir / "deep" / "f", [bytes(1 << 20)] * 64)
        assert host.stat(host.work_dir / "deep" / "f") is None
        assert host.free_bytes() > 7 << 20
        with pytest.raises(StorageError, match=r"\[eval\] no space is left"):
            lab_hosts.shell("eval").write_small(host.work_dir / "small", bytes(9 << 20))
        assert host.stat(host.work_dir / "small") is None
        source = lab_hosts.host("train")
        with pytest.raises(EvalError, match=r"\[eval\] 8 MiB are free"):
            copy_file(
                source,
                source.work_dir / "any",
                host,
                host.work_dir / "f",
                size_bytes=1 << 30,
                sha256=None,
                on_bytes=lambda *_: None,
            )
        host.write_blocks(host.work_dir / "f", [b"fits"])
        assert b"".join(host.read_blocks(host.work_dir / "f")) == b"fits"
    finally:
        lab_hosts.close()
        lab_hosts.lab.restart("eval")


def test_a_script_past_its_time_is_killed_with_all_it_started(lab_hosts: LabHosts) -> None:
    shell = lab_hosts.shell("eval")
    began = time.monotonic()
    with pytest.raises(HostError, match=r"\[eval\] time is up while running a script"):
        shell.run("trap '' TERM; sleep 101 & (sleep 102; true) & echo begun; sleep 103", timeout_s=1)
    assert time.monotonic() - began < 4
    assert soon(lambda: not any("sleep 10" in line for line in lab_hosts.lab.processes("eval").values()), 2)
    with pytest.raises(HostError, match="time is up"):
        shell.run("while :; do echo and so on; done", timeout_s=1)


def test_a_stalled_transfer_ends_though_the_link_lives(lab_hosts: LabHosts) -> None:
    """cat of a pipe that nobody writes to: sshd answers keepalives, no byte moves."""
    lab_hosts.put("eval", "x", b"")
    pipe = PurePosixPath(lab_hosts.lab.work / "pipe")
    os.mkfifo(lab_hosts.on_disk("eval", pipe))
    began = time.monotonic()
    with pytest.raises(HostError, match=r"\[eval\] nothing has moved for 5 s while reading"):
        list(lab_hosts.host("eval").read_blocks(pipe))
    assert 5 < time.monotonic() - began < 8


def test_an_idle_connection_is_kept_alive_and_a_cut_one_found_dead(lab_hosts: LabHosts) -> None:
    connection = lab_hosts.connection("eval")
    transport = connection.transport()
    time.sleep(3.6)
    assert transport.is_active(), "answered keepalives keep it"
    assert connection.transport() is transport
    lab_hosts.lab.cut_link("eval")
    try:
        assert soon(lambda: not transport.is_active(), NOTICED_S)
    finally:
        lab_hosts.lab.mend_link("eval")
    assert connection.transport() is not transport
