"""How a stage program's bad end is told: the same words and classes, wherever it ran.

`what` is always "[host] stage name"; `log_path` is on the relay.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

from dflash_model.errors import Cancelled, DeadlineExceeded, EvalError, HostError, StageError, StageKilled, from_json
from dflash_model.stages.protocol import EXIT_DEFECT

NOT_CONFIRMED = "It could not be confirmed that it is gone"
STUCK = "even by signal 9"
"""Words of the sentences that tell that something of a stage may run on; see `may_still_run`."""


def may_still_run(error: BaseException) -> bool:
    """True where an error of a stage says that its processes may not have ended: then what it used is not free yet."""
    said = " ".join([str(error), *getattr(error, "__notes__", ())])
    return NOT_CONFIRMED in said or STUCK in said


def stage_failure(error_json: bytes | None, *, exit_code: int, peak_rss_bytes: int, what: str, log_path: Path) -> EvalError:
    """The error of a stage program that ended by itself with another code than 0; `error_json` is what it left, if anything."""
    if exit_code < 0:
        return _killed(-exit_code, peak_rss_bytes, what=what, log_path=log_path)
    try:
        data = json.loads(error_json or b"")
    except ValueError:
        data = None
    if not isinstance(data, dict):
        return HostError(f"{what} ended with exit code {exit_code} and left no error.json.", f"Read {log_path}.")
    error = from_json(data)
    fix = f"{error.fix} Log: {log_path}" if exit_code == EXIT_DEFECT else error.fix
    return type(error)(f"{what}: {error.problem}", fix)


def _killed(number: int, peak_rss_bytes: int, *, what: str, log_path: Path) -> StageKilled:
    peak = f"peak memory was {peak_rss_bytes / 2**20:.0f} MiB"
    if number == signal.SIGKILL:
        return StageKilled(
            f"{what} was killed by signal 9, probably out of memory; {peak}.",
            f"Give it more memory or fewer threads, then run again; finished work is kept. Log: {log_path}",
        )
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return StageKilled(f"{what} was ended by {name}; {peak}.", f"Run again; finished work is kept. Log: {log_path}")


def not_started(what: str) -> Cancelled:
    """The run is ending: nothing new starts."""
    return Cancelled(f"{what} was not started: the run is ending.", "Run again; finished work is kept.")


def ended_on_request(what: str) -> Cancelled:
    """The run is ending, and this stage with it."""
    return Cancelled(f"{what} was ended on request.", "Run again; finished work is kept.")


def past_deadline(what: str, deadline_s: float) -> DeadlineExceeded:
    """The stage took too long."""
    return DeadlineExceeded(
        f"{what} ran past its deadline of {deadline_s:g} s and was ended.",
        "Raise deadline_s, or give the stage a faster host; finished samples are kept.",
    )


def cannot_start(what: str, program: str, reason: str) -> HostError:
    """The interpreter is not there, or does not run."""
    return HostError(f"{what}: could not start {program}: {reason}.", "Check `python` of that host.")


def no_artifact(what: str, key: str, log_path: Path) -> StageError:
    """Exit code 0, and yet the artifact is not there."""
    return StageError(f"{what} reported success but {key} is not complete.", f"Read {log_path}.")
