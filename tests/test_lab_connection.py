"""Connecting to real sshds: keys, host keys, ports, jump hosts, and one connection for everybody."""

import os
import subprocess
import threading
import time
from pathlib import Path

import paramiko
import pytest

from dflash_model.errors import HostError, InputError
from tasks.remote.chain import find_untrusted
from tasks.remote.connection import Connection
from tasks.remote.known_hosts import Verdict, add_known_host
from tasks.remote.ssh_shell import SshShell
from tests.lab_hosts import QUICK, LabHosts, make_key

pytestmark = pytest.mark.lab


def name_of(shell: SshShell) -> str:
    return shell.run("hostname", timeout_s=10).stdout.decode().strip()


def test_all_hosts_answer_and_gcm_is_agreed_on(lab_hosts: LabHosts) -> None:
    for name in ("train", "eval", "gpu-a", "gpu-b"):
        connection = lab_hosts.connection(name)
        assert name_of(SshShell(connection)) == name
        assert connection.transport().remote_cipher == "aes128-gcm@openssh.com"


def test_hosts_cannot_reach_each_other(lab_hosts: LabHosts) -> None:
    shell = lab_hosts.shell("train")
    knock = 'timeout 2 bash -c "exec 3<>/dev/tcp/{}/22" && echo open || echo closed'

    def answer(name: str) -> bytes:
        return shell.run(knock.format(lab_hosts.lab.hosts[name].address), timeout_s=10).stdout.strip()

    assert answer("train") == b"open"
    assert [answer(name) for name in ("eval", "gpu-a", "gpu-b")] == [b"closed"] * 3


def test_threads_share_one_connection_and_more_of_them_than_sshd_has_sessions(lab_hosts: LabHosts) -> None:
    shell = lab_hosts.shell("eval")
    answers: list[bytes] = []

    def ask(number: int) -> None:
        answers.append(shell.run(f"sleep 0.2; echo {number}", timeout_s=20).stdout)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == sorted(b"%d\n" % number for number in range(24))
    assert len(lab_hosts.sessions("eval")) == 1


def test_an_sshd_with_fewer_sessions_than_we_want_gets_a_second_connection(
    lab_hosts: LabHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.remote.connection._Line.__init__.__defaults__", (0, 50))  # sshd's MaxSessions is ten
    shell = lab_hosts.shell("eval")
    barrier = threading.Barrier(15)
    codes: list[int] = []

    def hold() -> None:
        barrier.wait()
        codes.append(shell.run("sleep 1", timeout_s=20).exit_code)

    threads = [threading.Thread(target=hold) for _ in range(15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 15
    assert len(lab_hosts.sessions("eval")) == 2


def test_threads_that_hold_a_session_and_need_another_do_not_wait_for_each_other(lab_hosts: LabHosts) -> None:
    connection = lab_hosts.connection("eval")
    barrier = threading.Barrier(8)
    answers: list[bytes] = []

    def hold() -> None:
        with connection.channel():
            barrier.wait()  # now one transport is full
            answers.append(SshShell(connection).run("echo x", timeout_s=10).stdout)

    threads = [threading.Thread(target=hold) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [b"x\n"] * 8


def test_another_port_has_its_own_line_in_known_hosts(lab_hosts: LabHosts, tmp_path: Path) -> None:
    assert name_of(lab_hosts.shell("eval", port=2222)) == "eval"
    only_22 = tmp_path / "known"
    address = lab_hosts.lab.hosts["eval"].address
    only_22.write_text(lab_hosts.lab.known_hosts.read_text().replace(f"[{address}]:2222", "[10.99.255.9]:2222"))
    assert name_of(lab_hosts.shell("eval", port=2222, known_hosts=(only_22,))) == "eval", "as ssh: known without a port is known"


def test_an_unknown_host_key_is_refused_until_it_is_trusted(lab_hosts: LabHosts, tmp_path: Path) -> None:
    known = tmp_path / "ssh" / "known_hosts"
    connection = lab_hosts.connection("eval", known_hosts=(known,))
    address = lab_hosts.lab.hosts["eval"].address
    with pytest.raises(HostError) as caught:
        connection.transport()
    public = (lab_hosts.lab.state / "hosts" / "eval" / "host_key.pub").read_text().split()[1]
    fingerprint = paramiko.PKey.from_path(lab_hosts.lab.state / "hosts" / "eval" / "host_key").fingerprint
    assert caught.value.problem.startswith(f"[eval] the host key of {address} is not known")
    assert fingerprint.startswith("SHA256:")
    assert fingerprint in caught.value.problem
    assert "`dflash-eval hosts trust eval`" in caught.value.fix
    assert f"{address} ssh-ed25519 {public}" in caught.value.fix
    assert not known.exists(), "nothing is ever trusted by itself"
    found = find_untrusted(connection.endpoint)
    assert found is not None
    assert (found.verdict, found.fingerprint) == (Verdict.UNKNOWN, f"ssh-ed25519 {fingerprint}")
    add_known_host(known, found.line)
    assert find_untrusted(connection.endpoint) is None
    assert name_of(lab_hosts.shell("eval", known_hosts=(known,))) == "eval"


def test_a_changed_host_key_is_refused_with_both_fingerprints(lab_hosts: LabHosts) -> None:
    old = paramiko.PKey.from_path(lab_hosts.lab.state / "hosts" / "gpu-b" / "host_key").fingerprint
    known = lab_hosts.lab.known_hosts.read_text()
    lab_hosts.lab.change_host_key("gpu-b")
    new = paramiko.PKey.from_path(lab_hosts.lab.state / "hosts" / "gpu-b" / "host_key").fingerprint
    try:
        with pytest.raises(HostError, match="has changed") as caught:
            lab_hosts.connection("gpu-b").transport()
        assert old in caught.value.problem
        assert new in caught.value.problem
        assert f"{lab_hosts.lab.known_hosts}:" in caught.value.problem
        assert "remove the old line" in caught.value.fix
    finally:
        old_line = next(line for line in known.splitlines() if line.startswith(f"{lab_hosts.lab.hosts['gpu-b'].address} "))
        kind, blob = (lab_hosts.lab.state / "hosts" / "gpu-b" / "host_key.pub").read_text().split()[:2]
        lab_hosts.lab.known_hosts.write_text(known.replace(old_line.split()[2], blob))
        assert kind == "ssh-ed25519"
    assert name_of(lab_hosts.shell("gpu-b")) == "gpu-b"


def test_each_way_to_have_no_good_key_is_a_sentence(lab_hosts: LabHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    wrong, locked = make_key(tmp_path), make_key(tmp_path, passphrase="secret")
    with pytest.raises(
        HostError, match=rf"\[eval\] root@{lab_hosts.lab.hosts['eval'].address} refused .*key-open \(SHA256:"
    ) as caught:
        lab_hosts.connection("eval", key=wrong).transport()
    assert "ssh-copy-id" in caught.value.fix
    with pytest.raises(HostError, match=r"key-locked is encrypted, and no passphrase is asked for") as caught:
        lab_hosts.connection("eval", key=locked).transport()
    assert "ssh-add" in caught.value.fix
    with pytest.raises(InputError, match=r"\[eval\] there is no key /none"):
        lab_hosts.connection("eval", key=Path("/none")).transport()
    with pytest.raises(InputError, match=r"is no private key that can be used"):
        lab_hosts.connection("eval", key=Path("/etc/hostname")).transport()
    with pytest.raises(HostError, match=r"there is no key to offer .*none of these exists: .*id_ed25519"):
        lab_hosts.connection("eval", key=None).transport()
    (tmp_path / ".ssh").mkdir()
    locked.rename(tmp_path / ".ssh" / "id_ed25519")
    with pytest.raises(HostError, match=r"there is no key to offer .*id_ed25519 is encrypted"):
        lab_hosts.connection("eval", key=None).transport()
    wrong.rename(tmp_path / ".ssh" / "id_ecdsa")
    with pytest.raises(HostError, match=r"refused .*id_ecdsa \(SHA256:.*Not offered: .*id_ed25519 is encrypted"):
        lab_hosts.connection("eval", key=None).transport()


def test_an_agent_opens_the_door_and_a_named_key_leaves_it_aside(
    lab_hosts: LabHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.01)
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        subprocess.run(["ssh-add", "-q", str(lab_hosts.lab.key)], check=True, env=os.environ, capture_output=True)
        assert name_of(lab_hosts.shell("eval", key=None)) == "eval"
        with pytest.raises(HostError, match="refused"):
            lab_hosts.connection("eval", key=make_key(tmp_path)).transport()
    finally:
        agent.terminate()
        agent.wait()


def test_a_user_that_does_not_exist_is_refused_like_a_wrong_key(lab_hosts: LabHosts) -> None:
    with pytest.raises(HostError, match=rf"\[eval\] nobody-here@{lab_hosts.lab.hosts['eval'].address} refused"):
        lab_hosts.connection("eval", user="nobody-here").transport()


def test_a_host_behind_a_jump_host_is_reached_and_its_key_is_checked_too(lab_hosts: LabHosts, tmp_path: Path) -> None:
    lab = lab_hosts.lab
    if "gate" not in lab.hosts:
        lab.add("gate", only_jumps=True)
        lab.add("inner", behind="gate")
        lab.restart("gate")
    inner, gate = lab.hosts["inner"].address, lab.hosts["gate"].address
    assert name_of(lab_hosts.shell("inner", jump=f"root@{gate}")) == "inner"
    assert name_of(lab_hosts.shell("inner", jump=f"root@{gate}:2222", port=2222)) == "inner"
    host = lab_hosts.host("inner", jump=f"root@{gate}")
    host.write_blocks(host.work_dir / "f", [b"x" * 3_000_000])
    assert sum(map(len, host.read_blocks(host.work_dir / "f"))) == 3_000_000

    with pytest.raises(HostError, match=r"the login shell ended before our script began.*this host only forwards"):
        lab_hosts.shell("gate").run("hostname", timeout_s=10)
    only_gate = tmp_path / "known"
    only_gate.write_text("".join(line for line in lab.known_hosts.read_text().splitlines(True) if line.startswith(gate)))
    endpoint = lab_hosts.endpoint("inner", jump=f"root@{gate}", known_hosts=(only_gate,))
    with pytest.raises(HostError, match=rf"\[inner\] the host key of {inner} is not known"):
        Connection(endpoint).transport()
    untrusted = find_untrusted(endpoint)
    assert untrusted is not None
    assert untrusted.hostname == inner
    with pytest.raises(HostError, match=rf"\[inner\] the jump host opened no connection to {inner}:22"):
        lab_hosts.connection("inner", jump=f"root@{lab.hosts['eval'].address}").transport()
    with pytest.raises(HostError, match=r"\[inner\] .* while connecting to"):
        lab_hosts.connection("inner").transport()


def test_an_unreachable_host_costs_one_time_out_and_then_answers_at_once(lab_hosts: LabHosts) -> None:
    connection = lab_hosts.connection("gpu-a")
    lab_hosts.lab.cut_link("gpu-a")
    try:
        with pytest.raises(HostError, match=rf"\[gpu-a\] .* while connecting to root@{lab_hosts.lab.hosts['gpu-a'].address}"):
            connection.transport()
        began = time.monotonic()
        for _ in range(50):
            with pytest.raises(HostError, match="while connecting to"):
                connection.transport()
        assert time.monotonic() - began < QUICK.connect / 2
    finally:
        lab_hosts.lab.mend_link("gpu-a")
    time.sleep(1.1)
    assert name_of(SshShell(connection)) == "gpu-a"


def test_a_refused_port_is_a_sentence(lab_hosts: LabHosts) -> None:
    address = lab_hosts.lab.hosts["eval"].address
    with pytest.raises(
        HostError, match=rf"\[eval\] nothing listens at that address and port while connecting to root@{address}:2223"
    ):
        lab_hosts.connection("eval", port=2223).transport()


def test_data_survives_many_changes_of_the_session_key(lab_hosts: LabHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paramiko.Packetizer, "REKEY_BYTES", 2 << 20)
    host = lab_hosts.host("eval")
    content = os.urandom(1 << 20) * 24
    host.write_blocks(host.work_dir / "f", [content])
    assert b"".join(host.read_blocks(host.work_dir / "f")) == content
