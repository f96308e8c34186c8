"""The training pipeline: order, bounds, who is the bottleneck, and how it ends when a worker does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dflash_model.errors import InputError, StageError
from dflash_model.training.pipeline import DRAFTER, PREFETCH, TARGET, Pipeline
from dflash_model.training.telemetry import BUSY, StageClock, Telemetry

Forward = Callable[[int], int]


def pipeline(prefetch: Forward, *forwards: Forward, steps: int = 12, prefetched: int = 2, queued: int = 1) -> Pipeline[int, int]:
    return Pipeline(prefetch, forwards, steps=range(steps), prefetched=prefetched, queued=queued)


def same(value: int) -> int:
    return value


def slowly(value: int) -> int:
    time.sleep(0.02)
    return value


def training_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("training")]


def test_steps_come_in_order_however_fast_each_worker_is() -> None:
    with pipeline(same, slowly, same, same, steps=10) as stages:
        assert list(stages) == list(range(10))
    assert training_threads() == []


def test_the_queues_are_bounded() -> None:
    """With 1 worker: at most 2 batches and 1 state wait, 1 of each is in a worker's hands, 1 was taken."""
    begun: list[int] = []

    def counted(step: int) -> int:
        begun.append(step)
        return step

    with pipeline(counted, same, steps=100) as stages:
        next(iter(stages))
        time.sleep(0.2)
        assert stages.queues() == {"batches": 2, "states": 1}
        assert len(begun) <= 6


@pytest.mark.parametrize("slow", [PREFETCH, TARGET, DRAFTER])
def test_a_slow_stage_shows_as_the_bottleneck(slow: str) -> None:
    with pipeline(slowly if slow == PREFETCH else same, slowly if slow == TARGET else same) as stages:
        telemetry = Telemetry(stages.clocks)
        for value in stages:
            with stages.clocks[DRAFTER].spending(BUSY):
                (slowly if slow == DRAFTER else same)(value)
            telemetry.count(tokens=10, anchors=2)
        sample = telemetry.sample(queues=stages.queues())
    assert sample["bottleneck"] == slow
    others = {PREFETCH, TARGET, DRAFTER} - {slow}
    assert all(sample["stages"][name]["busy"] < 0.5 < sample["stages"][slow]["busy"] for name in others), sample
    waiting = "starved" if slow != DRAFTER else "blocked"
    assert sample["stages"][TARGET if slow != TARGET else DRAFTER][waiting] > 0.4, sample
    assert sample["tokens_per_s"] > 0


def test_two_workers_share_a_slow_stage() -> None:
    def seconds(*forwards: Forward) -> float:
        start = time.perf_counter()
        with pipeline(same, *forwards, steps=12) as stages:
            assert list(stages) == list(range(12))
        return time.perf_counter() - start

    assert seconds(slowly, slowly) < 0.85 * seconds(slowly)


@pytest.mark.parametrize("error", [InputError("the target is gone.", "Find it."), RuntimeError("kernel"), MemoryError("full")])
@pytest.mark.parametrize("where", [PREFETCH, TARGET])
def test_a_failing_worker_ends_the_run_with_its_error(where: str, error: Exception) -> None:
    def failing(value: int) -> int:
        if value == 3:
            raise error
        return value

    target = failing if where == TARGET else same
    seen = []
    with (
        pytest.raises(type(error)) as caught,
        pipeline(failing if where == PREFETCH else same, target, target) as stages,
    ):
        seen.extend(stages)
    assert caught.value is error
    assert seen == list(range(len(seen)))
    assert len(seen) <= 3
    assert training_threads() == []


def test_a_worker_that_ends_too_early_is_an_error_and_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pipeline, "_run_target", lambda self, index: 0)
    with pytest.raises(StageError, match="ended before its work was done"), pipeline(same, same) as stages:
        list(stages)
    assert training_threads() == []


def diverges() -> None:
    with pipeline(same, same) as stages:
        for _ in stages:
            raise StageError("diverged.")


def test_a_failing_consumer_leaves_no_thread_behind() -> None:
    with pytest.raises(StageError, match="diverged"):
        diverges()
    assert training_threads() == []


def test_a_clock_adds_up_the_time_of_all_workers() -> None:
    clock = StageClock(2)
    for _ in range(2):
        with clock.spending(BUSY):
            time.sleep(0.01)
    assert clock.items == 2
    assert clock.reading()[BUSY] >= 0.02
