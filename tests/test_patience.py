"""Trying again: until it works, until the grace is over, or until there is another reason to stop."""

import itertools
import time
from collections.abc import Callable

import pytest

from dflash_model.errors import Cancelled, HostError, StorageError
from tasks.remote.patience import Patience, pause


def failing(times: int, calls: list[float]) -> Callable[[], str]:
    """Fails so often, then answers."""

    def action() -> str:
        calls.append(time.monotonic())
        if len(calls) <= times:
            raise HostError("The link is down.", "Wait.")
        return "there"

    return action


def patience(grace_s: float, check: Callable[[], None] = lambda: None) -> Patience:
    return Patience("[h] stage x", grace_s=grace_s, first_pause_s=0.02, check=check)


def test_it_repeats_until_it_works_and_waits_longer_each_time() -> None:
    calls: list[float] = []
    assert patience(20).call(failing(5, calls)) == "there"
    waits = [b - a for a, b in itertools.pairwise(calls)]
    assert len(waits) == 5
    assert waits[0] < 0.15
    assert waits[4] >= 0.16, "half of the longest fifth pause"


def test_past_the_grace_it_gives_up_with_the_last_reason() -> None:
    calls: list[float] = []
    trying = patience(0.3)
    started = time.monotonic()
    with pytest.raises(HostError) as caught:
        trying.call(failing(1000, calls))
    assert 0.3 <= time.monotonic() - started < 2
    assert caught.value.problem == "[h] stage x: the host could not be reached for 0.3 s: The link is down."
    assert trying.exhausted
    assert len(calls) > 2


def test_the_grace_counts_from_the_first_failure_in_a_row() -> None:
    trying = patience(0.4)
    for _ in range(4):
        assert trying.call(failing(2, [])) == "there"
        time.sleep(0.15)
    assert not trying.exhausted


def test_another_error_is_not_met_with_patience() -> None:
    def full() -> None:
        raise StorageError("No room.", "Free some.")

    with pytest.raises(StorageError):
        patience(20).call(full)


def test_a_reason_to_stop_is_heard_while_waiting() -> None:
    until = time.monotonic() + 0.2

    def check() -> None:
        if time.monotonic() > until:
            raise Cancelled("Stop.", "")

    with pytest.raises(Cancelled):
        patience(20, check).call(failing(1000, []))
    with pytest.raises(Cancelled):
        pause(20, check)
    assert time.monotonic() - until < 5
