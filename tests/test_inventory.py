"""Hosts files: what is read, and one sentence for each way to get one wrong."""

from pathlib import Path

import pytest

from dflash_model.errors import InputError
from tasks.remote.inventory import RELAY, SshAccess, read_inventory, single_machine


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    return path


def test_hosts_keep_their_order_and_the_relay_is_always_there(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "hosts:\n  b: {work_dir: b, roles: [eval]}\n  a: {work_dir: /abs/a, roles: [target, eval], threads: 3, slots: 2}\n",
    )
    inventory = read_inventory(path, home=tmp_path / "home")
    assert [h.name for h in inventory.hosts] == ["b", "a", RELAY]
    assert inventory.entry("b").work_dir == tmp_path / "b"
    assert inventory.entry("a").work_dir == Path("/abs/a")
    assert (inventory.entry("a").threads, inventory.entry("a").slots) == (3, 2)
    assert [h.name for h in inventory.with_role("eval")] == ["b", "a"]


def test_without_a_file_this_machine_plays_every_part(tmp_path: Path) -> None:
    inventory = single_machine(tmp_path)
    assert {inventory.with_role(role)[0].name for role in ("train", "target", "eval")} == {"here"}


def test_a_host_over_ssh_keeps_its_own_paths_and_the_relay_s_start_at_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "hosts:\n  a: {via: ssh, hostname: h.example, port: 2222, user: me, key: keys/k, known_hosts: [known, ~/known2], jump: 'x@j:22',"
        " work_dir: /data/../a b, roles: [target], threads: 3, slots: 2, python: /opt/py}\n"
        "  b: {via: ssh, work_dir: /b, roles: [train]}\n  c: {work_dir: c}\n",
    )
    inventory = read_inventory(path, home=tmp_path)
    a = inventory.entry("a")
    assert (a.via, str(a.work_dir), a.threads, a.slots, a.python) == ("ssh", "/data/../a b", 3, 2, "/opt/py")
    assert a.ssh == SshAccess(
        hostname="h.example",
        port=2222,
        user="me",
        key=tmp_path / "keys" / "k",
        known_hosts=(tmp_path / "known", Path.home() / "known2"),
        jump="x@j:22",
    )
    assert inventory.entry("b").ssh == SshAccess()
    assert inventory.entry("c").ssh is None


def test_how_fast_and_over_how_many_connections_files_move(tmp_path: Path) -> None:
    text = (
        "hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], connections: 4, max_mb_per_s: 12.5}\n"
        "  b: {via: ssh, work_dir: /b, roles: [train]}\n"
    )
    found = [entry.ssh for entry in read_inventory(write(tmp_path, text), home=tmp_path).hosts if entry.ssh is not None]
    assert [(access.connections, access.max_mb_per_s) for access in found] == [(4, 12.5), (1, None)]


def test_gpus_keep_their_order_and_are_optional(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "hosts:\n  a: {work_dir: a, gpus: [2, 0], min_gpu_memory_gib: 20}\n  b: {work_dir: b}\n"
        "  c: {via: ssh, work_dir: /c, roles: [target], threads: 1, gpus: [1], min_gpu_memory_gib: 0.5}\n",
    )
    inventory = read_inventory(path, home=tmp_path)
    found = {entry.name: (entry.gpus, entry.min_gpu_memory_gib) for entry in inventory.hosts}
    assert found == {"a": ((2, 0), 20.0), "b": ((), None), "c": ((1,), 0.5), RELAY: ((), None)}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hosts: [", "is not YAML"),
        ("nothing: 1", "has no `hosts:` mapping"),
        ("hosts: {}", "has no `hosts:` mapping"),
        ("hosts:\n  a: 3", "expected a mapping"),
        ("hosts:\n  a: {work_dir: a, thread: 2}", "unknown key 'thread'"),
        ("hosts:\n  a: {work_dir: a, via: carrier-pigeon}", "via 'carrier-pigeon' is not known"),
        ("hosts:\n  a: {work_dir: a, roles: [cook]}", "roles \\['cook'\\]"),
        ("hosts:\n  a: {roles: [eval]}", "`work_dir` is missing"),
        ("hosts:\n  a: {work_dir: a, slots: 0}", "`slots` is 0"),
        ("hosts:\n  a: {work_dir: a, threads: true}", "`threads` is True"),
        ("hosts:\n  relay: {work_dir: a}", "the name relay stands for"),
        ("hosts:\n  a: {work_dir: a, python: 3}", "`python` is 3"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, threads: 1, python: ~you/py}", "names another user's home"),
        ("hosts:\n  a: {work_dir: a, hostname: b}", "`hostname` is for hosts that SSH reaches"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, host: b}", "unknown key 'host'"),
        ("hosts:\n  a: {via: ssh, work_dir: a, roles: [train]}", "`work_dir` 'a' is not absolute"),
        ("hosts:\n  a: {via: ssh, work_dir: ~/a, roles: [train]}", "`work_dir` '~/a' is not absolute"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [eval]}", "`threads` is missing"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train, eval]}", "`threads` is missing"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], port: ssh}", "`port` is 'ssh'"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], port: 70000}", "`port` is 70000"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], user: 7}", "`user` is 7"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], jump: ''}", "`jump` is ''"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], known_hosts: {b: c}}", "`known_hosts` is"),
        ("hosts:\n  a: {work_dir: a, gpus: 0}", "`gpus` is 0"),
        ("hosts:\n  a: {work_dir: a, gpus: []}", "`gpus` is \\[\\]"),
        ("hosts:\n  a: {work_dir: a, gpus: [0, 1, 0]}", "`gpus` is \\[0, 1, 0\\]"),
        ("hosts:\n  a: {work_dir: a, gpus: [-1]}", "`gpus` is \\[-1\\]"),
        ("hosts:\n  a: {work_dir: a, gpus: [true]}", "`gpus` is \\[True\\]"),
        ("hosts:\n  a: {work_dir: a, gpus: ['0']}", "`gpus` is \\['0'\\]"),
        ("hosts:\n  a: {work_dir: a, roles: [eval], gpus: [0]}", "`gpus` is for hosts with the role target"),
        ("hosts:\n  a: {work_dir: a, gpus: [0], min_gpu_memory_gib: 0}", "`min_gpu_memory_gib` is 0"),
        ("hosts:\n  a: {work_dir: a, gpus: [0], min_gpu_memory_gib: .inf}", "`min_gpu_memory_gib` is inf"),
        ("hosts:\n  a: {work_dir: a, gpus: [0], min_gpu_memory_gib: true}", "`min_gpu_memory_gib` is True"),
        ("hosts:\n  a: {work_dir: a, gpus: [0], min_gpu_memory_gib: 20G}", "`min_gpu_memory_gib` is '20G'"),
        ("hosts:\n  a: {work_dir: a, min_gpu_memory_gib: 20}", "`min_gpu_memory_gib` without `gpus`"),
        ("hosts:\n  a: {work_dir: a, max_mb_per_s: 5}", "`max_mb_per_s` is for hosts that SSH reaches"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], max_mb_per_s: 0}", "`max_mb_per_s` is 0"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], max_mb_per_s: .nan}", "`max_mb_per_s` is nan"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], connections: 0}", "`connections` is 0"),
        ("hosts:\n  a: {via: ssh, work_dir: /a, roles: [train], connections: 9}", "`connections` is 9"),
    ],
)
def test_each_mistake_gets_its_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        read_inventory(write(tmp_path, text), home=tmp_path)


def test_a_missing_role_and_an_unknown_host_name_what_there_is(tmp_path: Path) -> None:
    inventory = read_inventory(write(tmp_path, "hosts:\n  a: {work_dir: a, roles: [eval]}\n"), home=tmp_path)
    with pytest.raises(InputError, match="role 'train'"):
        inventory.with_role("train")
    with pytest.raises(InputError, match="no host 'z'") as caught:
        inventory.entry("z")
    assert "a, relay" in caught.value.fix


def test_a_python_below_the_home_directory_is_expanded_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "hosts.yaml"
    path.write_text(
        "hosts:\n  a: {work_dir: a, python: ~/venv/bin/python}\n"
        "  b: {via: ssh, work_dir: /b, threads: 1, python: ~/venv/bin/python}\n"
    )
    a, b, _ = read_inventory(path, home=tmp_path).hosts
    assert (a.python, b.python) == ("/home/me/venv/bin/python", "~/venv/bin/python")
