"""The limit on bytes a second: how long whoever moved bytes is held up, by a clock of the test's own."""

import pytest

from tasks.remote import throttle
from tasks.remote.throttle import BURST_S, Throttle


class Clock:
    """time, without waiting."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(throttle, "time", made)
    return made


@pytest.mark.parametrize("block", [1000, 65_536, 5_000_000])
def test_the_pace_holds_whatever_the_blocks(clock: Clock, block: int) -> None:
    limited = Throttle(1e6)
    count = 10_000_000 // block
    for _ in range(count):
        limited.moved(block)
    assert clock.now - 100 == pytest.approx(count * block / 1e6 - BURST_S, abs=0.01)


def test_time_in_which_nothing_moved_is_no_credit(clock: Clock) -> None:
    limited = Throttle(1e6)
    limited.moved(2_000_000)
    clock.now += 60
    before = clock.slept
    limited.moved(3_000_000)
    assert clock.slept - before == pytest.approx(3 - BURST_S)


def test_without_a_limit_nothing_waits(clock: Clock) -> None:
    Throttle(None).moved(1 << 40)
    Throttle(5.0).moved(0)
    assert clock.slept == 0
    assert Throttle(None).step_bytes == 1 << 20
    assert Throttle(1e5).step_bytes == 100_000
    assert Throttle(1.0).step_bytes == 1 << 14
