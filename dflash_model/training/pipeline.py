"""The asynchronous pipeline: a prefetcher, target-forward workers, and the drafter's side that takes their states in order.

Step s is forwarded by target worker s modulo their number, through a bounded queue of its own: so order is kept without
sorting, memory is bounded, and the result does not depend on who is faster. A worker that fails, or ends too early,
stops all others, and its error is what the run ends with.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

from dflash_model.errors import StageError
from dflash_model.training.telemetry import BLOCKED, BUSY, STARVED, StageClock

T = TypeVar("T")
B = TypeVar("B")
S = TypeVar("S")
POLL_S = 0.05

PREFETCH, TARGET, DRAFTER = "prefetch", "target", "drafter"


class Stopped(Exception):
    """The pipeline was stopped while a worker waited; not an error of its own."""


class BoundedQueue(Generic[T]):
    """A queue whose waits end when the pipeline stops, and are counted."""

    def __init__(self, depth: int, stopping: threading.Event) -> None:
        self._queue: queue.Queue[T] = queue.Queue(maxsize=depth)
        self._stopping = stopping

    def put(self, item: T, clock: StageClock) -> None:
        """Wait for room. Raises Stopped."""
        with clock.spending(BLOCKED):
            while not self._stopping.is_set():
                try:
                    return self._queue.put(item, timeout=POLL_S)
                except queue.Full:
                    continue
        raise Stopped

    def get(self, clock: StageClock) -> T:
        """Wait for an item. Raises Stopped."""
        with clock.spending(STARVED):
            while not self._stopping.is_set():
                try:
                    return self._queue.get(timeout=POLL_S)
                except queue.Empty:
                    continue
        raise Stopped

    def depth(self) -> int:
        """Items in it now."""
        return self._queue.qsize()


class Pipeline(Generic[B, S]):
    """Runs `prefetch(step)` and then one of `forwards` on its result, ahead of whoever iterates over the steps."""

    def __init__(
        self,
        prefetch: Callable[[int], B],
        forwards: Sequence[Callable[[B], S]],
        *,
        steps: range,
        prefetched: int,
        queued: int,
    ) -> None:
        """`forwards`: one callable per target worker. `prefetched`: batches ahead in all, `queued`: states per worker."""
        self.clocks = {
            PREFETCH: StageClock(1),
            TARGET: StageClock(len(forwards)),
            DRAFTER: StageClock(1),
        }
        self._prefetch, self._forwards, self._steps = prefetch, forwards, steps
        self._stopping = threading.Event()
        per_worker = max(1, prefetched // len(forwards))
        self._batches: list[BoundedQueue[B]] = [BoundedQueue(per_worker, self._stopping) for _ in forwards]
        self._states: list[BoundedQueue[S]] = [BoundedQueue(queued, self._stopping) for _ in forwards]
        self._futures: list[Future[int]] = []
        self._pool = ThreadPoolExecutor(max_workers=1 + len(forwards), thread_name_prefix="training")

    def __enter__(self) -> Pipeline[B, S]:
        """Start the workers."""
        self._start(self._run_prefetch, len(self._steps))
        for index in range(len(self._forwards)):
            self._start(partial(self._run_target, index), len(self._steps[index :: len(self._forwards)]))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the workers and wait for them; what they are computing is finished first."""
        self._stopping.set()
        self._pool.shutdown(wait=True)

    def queues(self) -> dict[str, int]:
        """Items waiting now: batches before the target, states before the drafter."""
        return {"batches": sum(q.depth() for q in self._batches), "states": sum(q.depth() for q in self._states)}

    def __iter__(self) -> Iterator[S]:
        """The states of each step, in order. Raises the error of a worker that failed."""
        for number in range(len(self._steps)):
            try:
                yield self._states[number % len(self._states)].get(self.clocks[DRAFTER])
            except Stopped:
                self._raise_failure()
                raise

    def _start(self, work: Callable[[], int], expected: int) -> None:
        def ended(future: Future[int]) -> None:
            if future.exception() is not None or future.result() < expected:
                self._stopping.set()

        future = self._pool.submit(work)
        self._futures.append(future)
        future.add_done_callback(ended)

    def _run_prefetch(self) -> int:
        clock = self.clocks[PREFETCH]
        for number, step in enumerate(self._steps):
            with clock.spending(BUSY):
                batch = self._prefetch(step)
            self._batches[number % len(self._batches)].put(batch, clock)
        return len(self._steps)

    def _run_target(self, index: int) -> int:
        clock, done = self.clocks[TARGET], 0
        for _ in self._steps[index :: len(self._forwards)]:
            batch = self._batches[index].get(clock)
            with clock.spending(BUSY):
                states = self._forwards[index](batch)
            self._states[index].put(states, clock)
            done += 1
        return done

    def _raise_failure(self) -> None:
        """Raise what a worker failed with, the first cause rather than those that were stopped by it."""
        self._pool.shutdown(wait=True)
        for future in self._futures:
            error = future.exception()
            if error is not None and not isinstance(error, Stopped):
                raise error
        raise StageError("A worker of the training pipeline ended before its work was done.", "Resume the run.")
