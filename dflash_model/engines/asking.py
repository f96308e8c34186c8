"""Asking for many completions at a time, no more than the engine shall have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

Question = TypeVar("Question")
Reply = TypeVar("Reply")


def ask_all(
    questions: Sequence[Question], ask: Callable[[Question], Reply], *, concurrency: int
) -> Iterator[tuple[Question, Reply]]:
    """(question, reply) as they come, at most `concurrency` under way.

    After the first error no further question is begun; what is under way is still waited for and given, then it is raised.
    """
    failed = threading.Event()

    def attempt(question: Question) -> list[Reply]:
        """The reply, alone in a list; nothing where another question has failed already."""
        if failed.is_set():
            return []
        try:
            return [ask(question)]
        except BaseException:
            failed.set()
            raise

    executor = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="engine")
    failure: BaseException | None = None
    try:
        futures = {executor.submit(attempt, question): question for question in questions}
        for future in as_completed(futures):
            failure = failure or future.exception()
            if future.exception() is None:
                yield from ((futures[future], reply) for reply in future.result())
    finally:
        failed.set()
        executor.shutdown(wait=False, cancel_futures=True)
    if failure is not None:
        raise failure
