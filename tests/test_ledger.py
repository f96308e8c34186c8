"""The ledger is a hint: it remembers holders, and losing it loses nothing."""

import threading
from pathlib import Path

from dflash_model.artifacts import Manifest
from tasks.remote.ledger import Ledger


def manifest(key: str) -> Manifest:
    return Manifest(kind="thing", key=key, files=())


def test_holders_are_kept_in_the_order_seen(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    assert ledger.holders("k") == ()
    for host in ("b", "a", "b"):
        ledger.record(manifest("k"), host)
    assert Ledger(tmp_path).holders("k") == ("b", "a")


def test_a_forgotten_holder_is_gone_and_the_last_one_takes_the_entry_with_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.record(manifest("k"), "a")
    ledger.record(manifest("k"), "b")
    ledger.forget("k", "a")
    assert ledger.holders("k") == ("b",)
    ledger.forget("k", "b")
    ledger.forget("k", "b")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_entry_counts_as_none(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    (tmp_path / "k.json").write_text("{")
    assert ledger.holders("k") == ()
    ledger.record(manifest("k"), "a")
    assert ledger.holders("k") == ("a",)


def test_threads_do_not_lose_each_others_holders(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    hosts = [f"host-{n}" for n in range(16)]
    threads = [threading.Thread(target=ledger.record, args=(manifest("k"), host)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ledger.holders("k")) == sorted(hosts)
