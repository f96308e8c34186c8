"""Prefect's environment, set before Prefect is imported: Prefect reads it once, at import.

What the user has set stays. Without a server's address Prefect starts one of its own on the data below our home.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

DEFAULTS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_UI_API_URL": "/api",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
}
"""They keep Prefect to itself, and its UI reachable on whatever port or tunnel it is served."""

OUR_LOGGERS = ("tasks", "flows", "dflash_model")


def prepare(home: Path) -> None:
    """Set Prefect's variables for a run whose data lie below `home`. Call before `import prefect`."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("PREFECT_HOME", str(home / "prefect"))
    os.environ.setdefault("PREFECT_RESULTS_LOCAL_STORAGE_PATH", str(Path(os.environ["PREFECT_HOME"]) / "storage"))
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", ",".join(OUR_LOGGERS))


def hand_over(timeout_s: float = 20.0) -> None:
    """Let Prefect send the logs and events that it has queued; call while its server still lives."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        worker.drain_all(timeout=timeout_s, at_exit=False)


def quiet_console(log_path: Path) -> None:
    """Send what Prefect would print on the terminal to a file; the UI keeps getting it. Call after `import prefect`."""
    from prefect.logging.handlers import PrefectConsoleHandler

    log_path.parent.mkdir(parents=True, exist_ok=True)
    file = logging.FileHandler(log_path)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    names = [None, *[name for name in logging.root.manager.loggerDict if name.startswith("prefect")], *OUR_LOGGERS]
    for name in names:
        logger = logging.getLogger(name)
        kept = [handler for handler in logger.handlers if not isinstance(handler, PrefectConsoleHandler)]
        if name is None or len(kept) != len(logger.handlers):
            kept.append(file)
        logger.handlers = kept
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
