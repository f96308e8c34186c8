"""Where a stage may run, and who is left alone for a while."""

from pathlib import Path

import pytest

from dflash_model.errors import HostError, InputError
from tasks.remote import placement
from tasks.remote.inventory import RELAY, Inventory, read_inventory
from tasks.remote.placement import Avoided, blamed_host, candidates


@pytest.fixture
def inventory(tmp_path: Path) -> Inventory:
    path = tmp_path / "hosts.yaml"
    path.write_text(
        "hosts:\n  t: {work_dir: t, roles: [train]}\n  g1: {work_dir: g1, roles: [target]}\n"
        "  g2: {work_dir: g2, roles: [target, eval]}\n  e: {work_dir: e, roles: [eval]}\n"
    )
    return read_inventory(path, home=tmp_path)


def test_roles_decide_in_the_order_of_the_inventory(inventory: Inventory) -> None:
    assert candidates(inventory, "hidden-states", {}, failover=True) == ("g1", "g2")
    assert candidates(inventory, "replay", {}, failover=True) == ("g2", "e")
    assert candidates(inventory, "compare", {}, failover=True) == (RELAY,)


def test_placement_wins_and_without_failover_only_the_first_counts(inventory: Inventory) -> None:
    assert candidates(inventory, "hidden-states", {"hidden-states": ["e", "g1"]}, failover=True) == ("e", "g1")
    assert candidates(inventory, "hidden-states", {"hidden-states": ["e", "g1"]}, failover=False) == ("e",)
    assert candidates(inventory, "replay", {"hidden-states": ["e"]}, failover=False) == ("g2",)


def test_unknown_names_are_refused_with_the_known_ones(inventory: Inventory) -> None:
    with pytest.raises(InputError, match="no host 'zz'"):
        candidates(inventory, "replay", {"replay": ["zz"]}, failover=True)
    with pytest.raises(InputError, match="stage 'hidden_states'") as caught:
        candidates(inventory, "replay", {"hidden_states": ["g1"]}, failover=True)
    assert "hidden-states" in caught.value.fix


def test_an_error_names_the_host_it_speaks_of() -> None:
    assert blamed_host(HostError("[gpu-a] does not answer.")) == "gpu-a"
    assert blamed_host(HostError("No host can run replay: [gpu-a] does not answer.")) is None


def test_an_avoided_host_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])
    avoided = Avoided()
    avoided.note("g1", "it is down")
    assert avoided.reason("g1") == "it is down"
    assert avoided.reason("g2") is None
    now[0] += placement.AVOID_S
    assert avoided.reason("g1") is None
    avoided.note("g1", "again")
    avoided.clear()
    assert avoided.reason("g1") is None
