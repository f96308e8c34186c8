"""Ctrl-C and SIGTERM during a run: stage programs end first, then the run."""

from __future__ import annotations

import signal
from types import FrameType

from tasks.remote.processes import end_everything


def end_on_signals() -> None:
    """Make Ctrl-C and SIGTERM end every stage program first, so that nobody waits for them and none stays behind."""

    def end(number: int, _frame: FrameType | None) -> None:
        end_everything()
        signal.signal(number, signal.default_int_handler)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
