"""Hosts files: what is read, and one sentence for each way to get one wrong."""

from pathlib import Path

import pytest

from dflash_model.errors import InputError
from tasks.remote.inventory import RELAY, read_inventory, single_machine


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
