"""A lease is renewed while its body runs, and no longer."""

import threading
import time

import pytest

from dflash_model.errors import HostError
from tasks.remote import lease
from tasks.remote.lease import Lease


def test_it_is_renewed_again_and_again_even_after_a_failure_and_not_after_the_end() -> None:
    counts: list[int] = []
    fifth = threading.Event()

    def renew(count: int) -> None:
        counts.append(count)
        if count == 5:
            fifth.set()
        if count == 2:
            raise HostError("[h] the link is down.")

    with Lease(renew, every_s=0.01):
        assert fifth.wait(timeout=10)
    assert counts[:5] == [1, 2, 3, 4, 5]
    done = len(counts)
    time.sleep(0.1)
    assert len(counts) == done


def test_a_body_shorter_than_the_interval_renews_nothing() -> None:
    counts: list[int] = []
    with Lease(counts.append, every_s=5):
        pass
    assert counts == []


def test_a_renewal_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "JOIN_S", 0.1)
    reached, go_on = threading.Event(), threading.Event()

    def hang(_count: int) -> None:
        reached.set()
        go_on.wait(timeout=20)

    with Lease(hang, every_s=0.01):
        assert reached.wait(timeout=10)
        left = time.monotonic()
    assert time.monotonic() - left < 2
    go_on.set()
