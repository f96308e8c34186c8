"""The lab program: what it refuses to touch, and labs side by side that never reach for each other's things."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import instances
import pytest
from instances import Instance
from lab import Lab, LabHost
from namespaces import alive, namespaces, processes

PROGRAM = Path(__file__).resolve().parent.parent / "deployments" / "lab" / "lab.py"
HOLD = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from lab import Lab
lab = Lab(Path(sys.argv[2]))
lab.up()
print("up", flush=True)
time.sleep(600)
"""


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(RuntimeError, match="holds something that is not a lab"):
        Lab(tmp_path).up()
    assert (tmp_path / "precious").read_text() == "data"


def test_no_two_hosts_of_any_two_labs_share_an_address_or_a_name_and_the_kernel_takes_them() -> None:
    names = ("train", "eval", "gpu-a", "gpu-b", "gate", "inner", "outer")
    hosts = [
        LabHost(name=name, slot=slot, number=number) for slot in range(instances.SLOTS) for number, name in enumerate(names, 1)
    ]
    assert len({host.address for host in hosts}) == len({host.namespace for host in hosts}) == 31 * 7
    assert all(1 <= host.subnet <= 254 for host in hosts)
    assert all(len(host.namespace) <= 15 for host in hosts), "the longest name of a network interface"
    ones = [host for host in hosts if host.namespace.startswith(instances.prefix(1))]
    assert {host.slot for host in ones} == {1}, "lab 1's prefix is not the beginning of lab 10's"


@pytest.fixture
def number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Instance]]:
    """Takes a number for a lab until the test ends, where nobody's real lab is."""
    monkeypatch.setattr(instances, "RUN", tmp_path / "run")
    monkeypatch.setattr(instances, "PATIENCE_S", 0.1)
    given: list[Instance] = []

    def take() -> Instance:
        given.append(instances.free())
        return given[-1]

    yield take
    for instance in given:
        instance.release()


def made(directory: Path) -> Path:
    directory.mkdir()
    (directory / instances.MARK).touch()
    return directory


@pytest.fixture
def removed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prefixes whose processes and cables were asked to be removed."""
    asked: list[str] = []
    monkeypatch.setattr(instances, "remove_all", asked.append)
    return asked


def test_what_a_dead_owner_left_is_swept_and_a_living_one_s_and_a_kept_lab_stay(
    number: Callable[[], Instance], tmp_path: Path, removed: list[str]
) -> None:
    dead, kept, living = (number() for _ in range(3))
    for instance, name in ((dead, "dead"), (kept, "kept"), (living, "living")):
        instance.note(made(tmp_path / name), kept=name == "kept")
    dead.release()
    kept.release()
    instances.sweep()
    assert removed == [instances.prefix(dead.slot)]
    assert [(tmp_path / name).exists() for name in ("dead", "kept", "living")] == [False, True, True]
    assert number().slot == dead.slot
    with pytest.raises(RuntimeError, match="belongs to a process that still runs"):
        instances.of(tmp_path / "living")
    mine = instances.of(tmp_path / "kept")
    assert mine is not None
    assert mine.slot == kept.slot
    mine.release()
    assert instances.of(tmp_path / "nobody's") is None


def test_the_last_number_is_given_and_then_a_sentence(number: Callable[[], Instance]) -> None:
    held = [number() for _ in range(instances.SLOTS)]
    assert [instance.slot for instance in held] == list(range(31))
    with pytest.raises(RuntimeError, match="31 labs are up"):
        instances.free()
    held[7].release()
    assert number().slot == 7


@pytest.mark.lab
def test_two_labs_stand_side_by_side_and_a_killed_one_is_swept_without_harm_to_the_other(lab: Lab, tmp_path: Path) -> None:
    mine = lab.processes("eval"), sorted(namespaces(instances.prefix(lab.hosts["eval"].slot)))
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(PROGRAM.parent), str(tmp_path / "other")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "up\n"
        slot = {str(state): slot for state, slot in instances.listed()}[str(tmp_path / "other")]
        assert slot != lab.hosts["eval"].slot
        theirs = [pid for name in namespaces(instances.prefix(slot)) for pid in processes(name)]
        assert len(theirs) >= 4
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.communicate()
    assert namespaces(instances.prefix(slot)) != [], "its hosts outlive it"
    program = [sys.executable, str(PROGRAM)]
    kept = tmp_path / "kept"
    subprocess.run([*program, "up", "--state", str(kept)], check=True, capture_output=True)
    try:
        assert not (tmp_path / "other").exists()
        assert not any(alive(pid) for pid in theirs)
        listed = dict(instances.listed())
        assert tmp_path / "other" not in listed
        instances.sweep()
        status = subprocess.run([*program, "status"], check=True, capture_output=True, text=True).stdout
        assert f"{kept}: " in status
        assert len(namespaces(instances.prefix(listed[kept]))) == 4, "what `make lab` made is nobody's to sweep"
    finally:
        subprocess.run([*program, "down", "--state", str(kept)], check=True, capture_output=True)
    assert not kept.exists()
    assert namespaces(instances.prefix(listed[kept])) == []
    assert (lab.processes("eval"), sorted(namespaces(instances.prefix(lab.hosts["eval"].slot)))) == mine
