"""Running a stage program on a host that is reached by a Shell alone, over a link that may be cut at any time.

The program runs under a supervisor of its own on the host (dflash_model/stages/supervise.py): a cut link does not end it,
a dead relay does, when the lease lapses. So `grace_s` (how long we try to reach it again) should be below `lease_s`.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_model.artifacts import Manifest
from dflash_model.errors import EvalError, HostError
from dflash_model.stages.protocol import EXIT_DEFECT, Request
from dflash_model.storage import MANIFEST_NAME
from tasks.remote import failures
from tasks.remote.code import CodeArchive, ensure_code
from tasks.remote.environment import stage_variables
from tasks.remote.follower import Follower
from tasks.remote.host import OnEvent, StageRun
from tasks.remote.lease import Lease
from tasks.remote.packages import import_problem, wrong_packages
from tasks.remote.patience import Patience
from tasks.remote.processes import ending
from tasks.remote.shell import Shell
from tasks.remote.supervised_run import SupervisedRun

log = logging.getLogger(__name__)

LEASE_S = 300.0
RENEWALS_A_LEASE = 4
GRACE_S = 240.0
POLL_S = 1.0
END_GRACE_S = 15.0


class RemoteRunner:
    """Stage programs on one host, at most `slots` of this runner's at a time."""

    def __init__(
        self,
        shell: Shell,
        *,
        work_dir: PurePosixPath,
        python: str,
        code: CodeArchive,
        threads: int,
        slots: int,
        lease_s: float = LEASE_S,
        grace_s: float = GRACE_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._shell, self._work_dir, self._python, self._code = shell, work_dir, python, code
        self._threads = threads
        self._slots = threading.BoundedSemaphore(slots)
        self._lease_s, self._grace_s, self._poll_s = lease_s, grace_s, poll_s

    def run(self, request: Request, *, log_path: Path, deadline_s: float, on_event: OnEvent) -> StageRun:
        """Run one stage program to its end; its log is appended to `log_path` on the relay.

        Whatever is raised, the stage's processes are gone by then, or the error says what will end them. Raises what the
        stage left as its error, StageKilled, DeadlineExceeded, Cancelled, HostError (also past `grace_s` without a link).
        """
        what = f"[{self._shell.name}] stage {request.stage}"
        self._wait_for_slot(what)
        try:
            code_dir = ensure_code(self._shell, self._code, work_dir=self._work_dir, python=self._python)
            directory = self._work_dir / "runs" / f"{request.key}-{uuid.uuid4().hex[:8]}"
            variables = stage_variables(self._threads, gpu=request.local.get("gpu"))
            run = SupervisedRun(self._shell, directory, python=self._python, code_dir=code_dir, variables=variables)
            return self._run(run, request, what=what, log_path=log_path, deadline_s=deadline_s, on_event=on_event)
        finally:
            self._slots.release()

    def _wait_for_slot(self, what: str) -> None:
        while not self._slots.acquire(timeout=self._poll_s):
            if ending():
                raise failures.not_started(what)
        if ending():
            self._slots.release()
            raise failures.not_started(what)

    def _run(
        self, run: SupervisedRun, request: Request, *, what: str, log_path: Path, deadline_s: float, on_event: OnEvent
    ) -> StageRun:
        follower = Follower(
            run,
            what=what,
            log_path=log_path,
            deadline_s=deadline_s,
            on_event=on_event,
            grace_s=self._grace_s,
            poll_s=self._poll_s,
        )
        try:
            run.write(request, lease_s=self._lease_s, deadline_s=deadline_s)
        except EvalError:
            self._remove(run)
            raise
        with ExitStack() as afterwards:
            afterwards.push(functools.partial(self._end, run, follower))
            self._start(run, follower.patience, what)
            with Lease(run.renew_lease, every_s=self._lease_s / RENEWALS_A_LEASE):
                told = follower.follow()
        try:
            return self._outcome(told, request, run, follower)
        finally:
            self._remove(run)

    def _start(self, run: SupervisedRun, patience: Patience, what: str) -> None:
        """Once tried, the program may run, answer or not: so a cut link is met with patience from here on."""
        refused = run.refusal(patience.call(run.start))
        if refused is not None:
            raise failures.cannot_start(what, self._python, refused)

    def _end(self, run: SupervisedRun, follower: Follower, _kind: object, error: BaseException | None, _trace: object) -> None:
        """After an error, end what may still run. What cannot be confirmed is added to `error`."""
        if error is None:
            return
        note = self._end_group(run, follower)
        if not note:
            follower.hear_last_words()
            self._remove(run)
        elif isinstance(error, EvalError):
            raise type(error)(f"{error.problem} {note}", error.fix) from error
        else:
            error.add_note(note)

    def _end_group(self, run: SupervisedRun, follower: Follower) -> str:
        """ "" when the group is gone, else a sentence. A host that just was given up is not called again."""
        grace_s = min(self._grace_s, END_GRACE_S)
        patience = Patience(follower.what, grace_s=grace_s, first_pause_s=self._poll_s, check=lambda: None)
        if not follower.patience.exhausted:
            try:
                return _stuck(patience.call(run.end))
            except EvalError as exc:
                log.warning("%s", exc.problem)
        return f"{failures.NOT_CONFIRMED}; it ends by itself within {self._lease_s:g} s of the last contact."

    def _remove(self, run: SupervisedRun) -> None:
        try:
            run.remove()
        except EvalError as exc:
            log.warning("a run directory stays for a day: %s", exc.problem)

    def _outcome(self, told: dict[str, Any], request: Request, run: SupervisedRun, follower: Follower) -> StageRun:
        what, log_path = follower.what, follower.log_path
        if told["left"]:
            raise HostError(f"{what} has ended. {_stuck(told['left'])}", "Look for a process in uninterruptible sleep (state D).")
        if told["reason"] != "itself":
            raise self._ended_by_others(told, follower)
        if told["exit_code"] != 0:
            error = failures.stage_failure(
                follower.read_all(functools.partial(run.read_block, "error.json")),
                exit_code=told["exit_code"],
                peak_rss_bytes=told["peak_rss_bytes"],
                what=what,
                log_path=log_path,
            )
            missing = import_problem(error) if told["exit_code"] == EXIT_DEFECT else None
            raise wrong_packages(self._shell, python=self._python, what=what, reason=missing) if missing else error
        manifest = self._manifest(request, follower)
        if manifest is None:
            raise failures.no_artifact(what, request.key, log_path)
        return StageRun(manifest=manifest, seconds=told["seconds"], peak_rss_bytes=told["peak_rss_bytes"])

    def _ended_by_others(self, told: dict[str, Any], follower: Follower) -> EvalError:
        what = follower.what
        again = "Run again; finished work is kept."
        match told["reason"]:
            case "deadline":
                return failures.past_deadline(what, follower.deadline_s)
            case "cancel":
                return failures.ended_on_request(what)
            case "start":
                return failures.cannot_start(what, self._python, told["detail"])
            case "lease":
                return HostError(f"{what} was ended by its host, which had not heard of us for {self._lease_s:g} s.", again)
            case _:
                return HostError(f"{what} was ended by a signal to its supervisor; the host may be going down.", again)

    def _manifest(self, request: Request, follower: Follower) -> Manifest | None:
        path = PurePosixPath(request.work_dir) / "artifacts" / request.key / MANIFEST_NAME
        content = follower.read_all(functools.partial(self._shell.read_from, path))
        try:
            return Manifest.from_json(json.loads(content))
        except (ValueError, KeyError, TypeError):
            return None


def _stuck(left: list[int]) -> str:
    return f"Processes {left} on that host do not end, {failures.STUCK}." if left else ""
