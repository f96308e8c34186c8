"""What a transfer says of itself: pace of late, percent, time left, and what moved in the end."""

import pytest

from flows.running import _moved
from flows.terminal import amount
from tasks import moving
from tasks.events import Event, listening, moved_text, moving_text
from tasks.moving import Meter


class Clock:
    """time, as the test says."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(moving, "time", made)
    return made


def test_pace_counts_neither_what_an_earlier_run_moved_nor_the_distant_past(clock: Clock) -> None:
    heard: list[Event] = []
    with listening(heard.append):
        meter = Meter("relay x", "eval", source_bytes=17_200_000_000)
        meter(2_000_000_000, 5_100_000_000)  # resumed
        assert meter.bytes_per_s is None
        for second in range(1, 31):
            clock.now = 50.0 + second
            pace = 1_000_000 if second <= 15 else 40_000_000
            meter(2_000_000_000 + min(second, 15) * 1_000_000 + max(0, second - 15) * pace, 5_100_000_000)
    assert meter.bytes_per_s == 40_000_000, "of the last ten seconds"
    assert (heard[0].done, heard[0].per_second) == (2_000_000_000, 0.0)
    assert heard[-1].per_second == 40_000_000
    assert amount(heard[-1]) == "2.6 of 5.1 GB, 40.0 MB/s, about 62 s left"


def test_events_are_few_but_the_last_one_comes(clock: Clock) -> None:
    heard: list[Event] = []
    with listening(heard.append):
        meter = Meter("relay x", "eval", source_bytes=10)
        for done in range(1, 1001):
            clock.now += 0.001
            meter(done, 1000)
    assert len(heard) < 10
    assert heard[-1].done == 1000


def test_a_fresh_start_is_no_negative_pace(clock: Clock) -> None:
    meter = Meter("relay x", "eval", source_bytes=10)
    for done in (0, 500, 100, 200):
        clock.now += 1
        meter(done, 1000)
    assert meter.bytes_per_s == 100


def test_what_moved_is_told_and_goes_into_the_run(clock: Clock) -> None:
    heard: list[Event] = []
    transfer = {
        "bytes_written": 5_100_000_000,
        "bytes_read": 5_100_100_000,
        "bytes_resumed": 0,
        "checked": "crc32",
        "seconds": 61.0,
    }
    with listening(heard.append):
        fields = Meter("relay x", "eval", source_bytes=17_200_000_000).finished(transfer)
        Meter("relay x", "eval", source_bytes=9_000_000).finished(transfer | {"bytes_resumed": 3_000_000, "checked": "unchecked"})
    assert heard[0].message == "moved 5.1 of 17.2 GB in 61.0 s, checked by CRC32"
    assert "3.0 MB had arrived before, checked at the source: unchecked" in heard[1].message
    assert fields == {"moved_bytes": 5_100_000_000, "read_bytes": 5_100_100_000, "source_bytes": 17_200_000_000}
    stages = [{"name": "relay a", **fields}, {"name": "relay b", **fields}, {"name": "replay"}]
    assert _moved(stages) == " Checkpoints: moved 10.2 of 34.4 GB."
    assert _moved([{"name": "replay"}]) == ""


def test_units() -> None:
    assert moved_text(1_000_000, 3_000_000) == "moved 1.0 of 3.0 MB"
    assert moving_text(1, 3_000_000, None) == "0.0 of 3.0 MB"
