"""Process groups: who is in one, that a number used again is noticed, and that a group ends but for whom it shall spare."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_model.stages import process_groups
from dflash_model.stages.process_groups import ProcessIdentity, end_group, members

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {STUBBORN!r}])"


def start(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)


@pytest.fixture
def group() -> Iterator[subprocess.Popen[bytes]]:
    """A process and a child of it that ignores SIGTERM."""
    leader = start(PARENT)
    assert leader.stdout is not None
    leader.stdout.readline()
    yield leader
    if members(leader.pid):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.communicate()


def identity_of(pid: int) -> ProcessIdentity:
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return dataclasses.replace(ProcessIdentity.of_this_process(), pid=pid, start_ticks=ticks)


def test_members_are_those_that_run(group: subprocess.Popen[bytes]) -> None:
    pids = members(group.pid)
    assert group.pid in pids
    assert len(pids) == 2
    os.killpg(group.pid, signal.SIGKILL)
    until = time.monotonic() + 10
    while members(group.pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert members(group.pid) == []
    assert Path(f"/proc/{group.pid}").exists(), "a zombie is there but does not run"
    assert not identity_of(group.pid).alive()


def test_a_group_ends_even_if_one_ignores_sigterm(group: subprocess.Popen[bytes]) -> None:
    started = time.monotonic()
    assert end_group(group.pid, term_grace_s=0.3) == []
    assert 0.3 <= time.monotonic() - started < 5
    assert members(group.pid) == []


def test_one_process_is_spared(group: subprocess.Popen[bytes]) -> None:
    assert end_group(group.pid, spare=group.pid, term_grace_s=0.3) == []
    group.wait(timeout=10)
    assert group.returncode not in (-signal.SIGTERM, -signal.SIGKILL), "it ended because its child did"


def test_those_that_stay_are_named(group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "_signal", lambda *_arguments: None)
    assert sorted(end_group(group.pid, term_grace_s=0, kill_grace_s=0)) == sorted(members(group.pid))
    assert len(members(group.pid)) == 2


def test_an_identity_survives_json_and_knows_its_process(group: subprocess.Popen[bytes]) -> None:
    own = ProcessIdentity.of_this_process()
    assert ProcessIdentity.from_json(own.to_json()) == own
    assert own.alive()
    assert own.number_is_ours()
    assert identity_of(group.pid).alive()


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another"}])
def test_a_number_used_again_is_noticed(change: dict[str, int | str]) -> None:
    stranger = dataclasses.replace(ProcessIdentity.of_this_process(), **change)  # type: ignore[arg-type]
    assert not stranger.alive()
    assert not stranger.number_is_ours()


def test_a_number_that_nobody_has_is_still_ours() -> None:
    child = start("pass")
    identity = identity_of(child.pid)
    child.communicate()
    assert not identity.alive()
    assert identity.number_is_ours(), "its group may have members yet"
