"""A progress bar in Prefect's UI, for what takes longer than a moment."""

from __future__ import annotations

import logging
import time
from typing import Any

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.exceptions import MissingContextError
from prefect.logging import get_run_logger

AFTER_S = 3.0
EVERY_S = 2.0


class ProgressArtifact:
    """Made when a task has run for AFTER_S, updated every EVERY_S; outside a task run it does nothing."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._began = self._shown = time.monotonic()
        self._artifact: Any = None

    def show(self, percent: float, detail: str = "") -> None:
        """How far it is; `detail` stands beside the title."""
        now = time.monotonic()
        if now - self._began < AFTER_S or (now - self._shown < EVERY_S and percent < 100):
            return
        self._shown = now
        if not _in_a_run():
            return
        description = f"{self._title}: {detail}" if detail else self._title
        if self._artifact is None:
            self._artifact = create_progress_artifact(progress=percent, description=description)
        else:
            update_progress_artifact(self._artifact, progress=percent, description=description)


def run_logger(fallback: logging.Logger) -> Any:
    """Prefect's logger of this run, or `fallback` outside one."""
    try:
        return get_run_logger()
    except MissingContextError:
        return fallback


def _in_a_run() -> bool:
    try:
        get_run_logger()
    except MissingContextError:
        return False
    return True
