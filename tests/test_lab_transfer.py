"""A transfer across real hosts whose sshd session is killed under way goes on and ends with the same digest."""

import hashlib
import os
import signal
from pathlib import Path

import pytest

from tasks.remote.transfer import copy_file
from tests.lab_hosts import LabHosts

pytestmark = pytest.mark.lab
SIZE = 48 << 20


@pytest.mark.parametrize("victim", ["train", "eval"])
def test_sshd_killed_in_mid_transfer_costs_a_break_and_not_the_file(lab_hosts: LabHosts, victim: str) -> None:
    content = os.urandom(1 << 20) * (SIZE >> 20)
    path = lab_hosts.put("train", "step.pt", content)
    source, destination = lab_hosts.host("train"), lab_hosts.host("eval")
    killed: list[int] = []
    offsets: list[int] = []

    def on_bytes(done: int, _total: int) -> None:
        offsets.append(done)
        if done > SIZE // 3 and not killed:
            killed.extend(lab_hosts.sessions(victim))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    to = destination.work_dir / "incoming" / "step.pt"
    digest = copy_file(source, path, destination, to, size_bytes=len(content), sha256=None, on_bytes=on_bytes)
    assert killed
    assert digest == hashlib.sha256(content).hexdigest()
    assert hashlib.sha256(Path(lab_hosts.on_disk("eval", to)).read_bytes()).hexdigest() == digest
    # It went on behind what had arrived and did not start again.
    assert sum(done <= 1 << 20 for done in offsets) <= 40
    assert [done for done in offsets[len(offsets) // 2 :] if done <= 1 << 20] == []
