"""`hosts check` and `hosts trust` against real hosts."""

from pathlib import Path

import pytest
import yaml
from lab import Lab

from flows.cli import main
from tests.lab_hosts import LabHosts

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("lab_hosts")]


@pytest.fixture
def hosts_file(lab: Lab, tmp_path: Path) -> Path:
    """The lab's inventory with short times and a known_hosts file of its own, still empty."""
    inventory = yaml.safe_load(lab.hosts_file.read_text())
    (tmp_path / "known").touch()
    for entry in inventory["hosts"].values():
        entry |= {"key": str(lab.key), "known_hosts": str(tmp_path / "known"), "silence_s": 3}
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(inventory, sort_keys=False))
    return tmp_path / "hosts.yaml"


def run(action: str, hosts_file: Path, *more: str) -> int:
    return main(["hosts", action, *more, "--hosts", str(hosts_file), "--home", str(hosts_file.parent / "home")])


def test_hosts_are_refused_until_trusted_and_then_described(
    lab: Lab, hosts_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("check", hosts_file) == 3
    refused = capsys.readouterr().out
    address = lab.hosts["train"].address
    assert f"the host key of {address} is not known; the host offers ssh-ed25519 SHA256:" in refused
    assert "`dflash-eval hosts trust train`" in refused

    for name in lab.hosts:
        assert run("trust", hosts_file, name, "--yes") == 0
    assert (hosts_file.parent / "known").read_text().count("ssh-ed25519") == 4
    capsys.readouterr()

    assert run("check", hosts_file) == 0
    out = capsys.readouterr().out
    for name in (*lab.hosts, "relay"):
        assert name in out
    assert "torch 2." in out
    assert "Pairs that reach each other: none (of 12 tried)." in out
    assert [path for path in lab.files("train") if "/work/" in path] == []


def test_a_host_that_is_down_is_said_beside_the_others(lab: Lab, hosts_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in lab.hosts:
        run("trust", hosts_file, name, "--yes")
    capsys.readouterr()
    lab.cut_link("gpu-a")
    try:
        assert run("check", hosts_file) == 3
    finally:
        lab.restart("gpu-a")  # its sshd would wait two minutes for the login that was cut off
    out = capsys.readouterr().out
    assert "gpu-a: [gpu-a] the host did not answer in time" in out
    assert "eval" in out


def test_a_changed_key_is_never_added_beside_the_old_one(
    lab: Lab, lab_hosts: LabHosts, hosts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("trust", hosts_file, "gpu-b", "--yes")
    before = (hosts_file.parent / "known").read_text()
    lab.change_host_key("gpu-b")
    try:
        assert run("trust", hosts_file, "gpu-b", "--yes") == 2
        assert "is changed" in capsys.readouterr().err
        assert (hosts_file.parent / "known").read_text() == before
    finally:
        # What the rest of the session knows the host by.
        key = (lab.state / "hosts" / "gpu-b" / "host_key.pub").read_text().split()[:2]
        kept = [line for line in lab.known_hosts.read_text().splitlines() if lab.hosts["gpu-b"].address not in line]
        lines = [f"{name} {' '.join(key)}" for name in (lab.hosts["gpu-b"].address, f"[{lab.hosts['gpu-b'].address}]:2222")]
        lab.known_hosts.write_text("\n".join([*kept, *lines, ""]))
