"""The symbolic unpickler: hostile pickles run nothing and cost little; honest ones come out as data."""

import argparse
import collections
import enum
import json
import os
import pickle
import pickletools
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_model.checkpoint.pickle_stack import Limits
from dflash_model.checkpoint.symbolic import load_symbolic
from dflash_model.checkpoint.symbols import Global, Key, Members, Node, PersistentId, attributes
from dflash_model.errors import CheckpointError
from tests.hostile_pickles import costly, executing, malformed

ROOT = Path(__file__).resolve().parent.parent
MOST_MEGABYTES = 200
MOST_TIMES_LISTING = 8
"""A pickle may cost so many times what Python's own listing of as many opcodes as are allowed costs on this machine, now."""


def run_hostile(directory: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests" / "hostile_pickles.py"), str(directory), *options]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("hostile")
    return directory, run_hostile(directory)


def test_hostile_pickles_run_nothing(hostile: tuple[Path, dict[str, Any]]) -> None:
    directory, found = hostile
    assert not (directory / "marker").exists()
    assert set(found) == {*executing(""), *costly(), *malformed()}
    assert [f"{name}: {one['outcome']}" for name, one in found.items() if one["outcome"].startswith("escaped")] == []


def test_the_same_pickles_do_run_in_pythons_own_unpickler(tmp_path: Path) -> None:
    ran = run_hostile(tmp_path, "--unprotected")
    assert [name for name, did in ran.items() if not did] == []
    assert len(ran) == len(executing(""))


def test_hostile_pickles_cost_little(hostile: tuple[Path, dict[str, Any]]) -> None:
    _, found = hostile
    started = time.process_time()
    assert sum(1 for _ in pickletools.genops(b"N" * (Limits().opcodes - 1) + b".")) == Limits().opcodes
    most = MOST_TIMES_LISTING * (time.process_time() - started)
    slow = {name: one["seconds"] for name, one in found.items() if one["seconds"] > most}
    fat = {name: one["megabytes"] for name, one in found.items() if one["megabytes"] > MOST_MEGABYTES}
    assert slow == {}
    assert fat == {}


def test_malformed_pickles_are_refused_in_a_sentence(hostile: tuple[Path, dict[str, Any]]) -> None:
    _, found = hostile
    for name in malformed():
        assert found[name]["outcome"].startswith("refused: The pickle "), name
        assert found[name]["outcome"].endswith("."), name


class Colour(enum.Enum):
    RED = 1


@dataclass
class Settings:
    lr: float
    name: str


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol_comes_out_equal(protocol: int) -> None:
    value = {
        "none": None, "yes": True, "no": False, "small": 7, "negative": -300, "large": 1 << 90, "half": 0.5,
        "text": "grüße \n 漢", "bytes": bytes(range(256)), "list": [1, [2, []]],
        "tuple": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "ordered": collections.OrderedDict(a=1, b=2), "default": collections.defaultdict(list, a=[1]),
        "complex": 1 + 2j, "bytearray": bytearray(b"\x00\xff"), "empty": {},
    }  # fmt: skip
    assert load_symbolic(pickle.dumps(value, protocol), what="x") == value | {"bytearray": b"\x00\xff"}


@pytest.mark.parametrize("protocol", range(6))
def test_classes_come_out_as_names_and_attributes(protocol: int) -> None:
    value = [argparse.Namespace(lr=0.1), Settings(0.2, "a"), Colour.RED, {1, 2}, frozenset({3}), {(1, 2): "pair", 5: "five"}]
    namespace, settings, colour, some, frozen, keyed = load_symbolic(pickle.dumps(value, protocol), what="x")
    assert attributes(namespace) == {"lr": 0.1}
    assert attributes(settings) == {"lr": 0.2, "name": "a"}
    assert isinstance(colour, Node)
    assert sorted(some.items) == [1, 2]
    assert isinstance(frozen, Members)
    assert frozen.items == [3]
    assert [(key.value, item) for key, item in keyed.items()] == [((1, 2), "pair"), (5, "five")]
    if protocol >= 2:
        assert isinstance(namespace.called, Global)
        assert namespace.type_name == "argparse.Namespace"
        assert settings.type_name == f"{__name__}.Settings"
        assert (colour.type_name, colour.args) == (f"{__name__}.Colour", (1,))


def test_shared_objects_stay_shared_and_cycles_stay_cycles() -> None:
    shared = [1]
    ring: list[Any] = []
    ring.append(ring)
    first, second, loop = load_symbolic(pickle.dumps((shared, shared, ring)), what="x")
    assert first is second
    assert loop[0] is loop


def test_a_dict_subclass_keeps_its_pairs_and_a_list_subclass_its_items() -> None:
    data = b"\x80\x04" + b"cmodule\nTable\n)\x81" + b"(K\x01K\x02u" + b"cmodule\nRow\n)\x81(K\x03K\x04e" + b"\x86."
    table, row = load_symbolic(data, what="x")
    assert table.pairs == [(1, 2)]
    assert row.items == [3, 4]


def test_a_persistent_id_is_kept_for_the_reader_of_storages() -> None:
    loaded = load_symbolic(b"\x80\x02X\x07\x00\x00\x00storageK\x05\x86Q.", what="x")
    assert isinstance(loaded, PersistentId)
    assert loaded.value == ("storage", 5)


def test_keys_that_could_collide_are_hashed_by_identity() -> None:
    keys = list(load_symbolic(pickle.dumps({0: 1, (1 << 61) - 1: 2, 1.5: 3, b"b": 4, "s": 5}), what="x"))
    assert [type(key) for key in keys] == [Key, Key, Key, bytes, str]
    assert hash(0) == hash((1 << 61) - 1)
    assert hash(keys[0]) != hash(keys[1])


def test_the_limits_are_what_refuses(hostile: tuple[Path, dict[str, Any]]) -> None:
    data = pickle.dumps(list(range(300)))
    assert load_symbolic(data, what="x", limits=Limits(opcodes=400)) == list(range(300))
    for limits, reason in (
        (Limits(opcodes=200), "more than 200 pickle operations"),
        (Limits(memory_bytes=2000), "more than 2000 bytes"),
        (Limits(pickle_bytes=100), "more than 100"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            load_symbolic(data, what="x", limits=limits)
    with pytest.raises(CheckpointError, match="integer of more than 4 bytes"):
        load_symbolic(pickle.dumps(1 << 40), what="x", limits=Limits(integer_bytes=4))
    _, found = hostile
    assert "more than" in found["list_flood"]["outcome"]
    assert "memo" in found["memo_bomb"]["outcome"]


def test_nothing_is_imported() -> None:
    sys.modules.pop("this", None)
    loaded = load_symbolic(b"cthis\ns\n.", what="x")
    assert isinstance(loaded, Global)
    assert "this" not in sys.modules
