"""One stage program under its supervisor on a host: its run directory there, and what one may ask and tell it.

Each method is one short script or one read, may raise HostError at any time, and may be called again: none does its work
twice. The file formats are those of dflash_model/stages/supervise.py, which runs at the other end.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from dflash_model.errors import HostError
from dflash_model.stages.process_groups import KILL_GRACE_S, TERM_GRACE_S, ProcessIdentity
from dflash_model.stages.protocol import Request
from tasks.remote.code import last_line
from tasks.remote.command import program
from tasks.remote.shell import Completed, Shell

CALL_TIMEOUT_S = 30.0
END_TIMEOUT_S = 2 * (TERM_GRACE_S + KILL_GRACE_S) + CALL_TIMEOUT_S
REMOVE_WAIT_S = 5

_ALIVE = """\
alive() {{
  read -r boot < /proc/sys/kernel/random/boot_id && [ "$boot" = {boot_id} ] || return 1
  {{ read -r stat < /proc/{pid}/stat; }} 2>/dev/null || return 1
  set -- ${{stat##*) }}
  [ "$1" != Z ] && [ "$1" != X ] && [ "${{20}}" = {start_ticks} ]
}}
"""
"""Is it still the same process? Its start is field 22 of /proc/PID/stat, and two fields end with the last bracket."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One look at a run. It is consistent: with an `ending`, the sizes are final."""

    alive: bool
    """The supervisor runs. Gone without an ending: it was killed, or its host went down."""

    ending: dict[str, Any] | None
    """exit.json, see `supervise.Ending`; None while there is none."""

    answers_bytes: int
    """Size of the answers so far."""

    log_bytes: int
    """Size of the log so far."""


class SupervisedRun:
    """A run directory on a host."""

    def __init__(
        self, shell: Shell, directory: PurePosixPath, *, python: str, code_dir: PurePosixPath, variables: Mapping[str, str]
    ) -> None:
        self._shell, self._directory, self._python = shell, directory, python
        # A colon would end the entry; a relative path has none, and Python makes it absolute when it starts, in the run directory.
        place = os.path.relpath(code_dir, directory) if ":" in str(code_dir) else str(code_dir)
        self._variables = {**variables, "PYTHONPATH": place}
        self._cd = f"cd {shlex.quote(str(directory))}"
        self._supervisor: ProcessIdentity | None = None
        self._gpu_lock: tuple[str, str] | None = None

    def write(self, request: Request, *, lease_s: float, deadline_s: float) -> None:
        """Make the directory; the orders come first, since they mark it as one of ours. Raises HostError, StorageError."""
        if "gpu_lock" in request.local:
            self._gpu_lock = tuple(request.local["gpu_lock"])
        orders = {"python": self._python, "lease_s": lease_s, "deadline_s": deadline_s}
        self._shell.write_small(self._directory / "supervise.json", json.dumps(orders).encode())
        self._shell.write_small(self._directory / "request.json", json.dumps(request.to_json()).encode())

    def start(self) -> Completed:
        """Start the supervisor, or find it started; returns when it has detached. `refusal` says what came of it."""
        return self._run(f"{self._cd} && {self._require_lock()}exec {self._supervise()}")

    def refusal(self, completed: Completed) -> str | None:
        """What was said instead of starting; None when there is a supervisor, which is known from now on."""
        try:
            self._supervisor = ProcessIdentity.from_json(json.loads(completed.stdout))
        except (ValueError, KeyError, TypeError):
            return last_line(completed.stderr)
        return None

    def look(self) -> Look:
        """How it stands. Life is asked after first, exit.json next, sizes last: in any other order an ending in between misleads."""
        script = self._alive() + (
            "if alive; then echo alive; else echo gone; fi\n"
            f"{self._cd} 2>/dev/null || {{ echo 0; echo 0; exit 0; }}\n"
            "ending=$(cat exit.json 2>/dev/null)\n"
            'for name in answers.jsonl log; do stat -c %s "$name" 2>/dev/null || echo 0; done\n'
            "printf '%s\\n' \"$ending\""
        )
        answer = self._run(script)
        try:
            life, answers_bytes, log_bytes, ending = (answer.stdout.decode() + "\n").split("\n", 3)
            return Look(
                alive=life == "alive",
                ending=json.loads(ending) if ending.strip() else None,
                answers_bytes=int(answers_bytes),
                log_bytes=int(log_bytes),
            )
        except ValueError as exc:
            said = last_line(answer.stderr)
            raise HostError(f"[{self._shell.name}] could not look at {self._directory}: {said}.", "Run again.") from exc

    def renew_lease(self, count: int) -> None:
        """Show the supervisor that a runner lives; on a full disk the file's time must do."""
        self._run(f"{self._cd} && {{ echo {count} > lease.part && mv lease.part lease || touch lease; }}")

    def read_block(self, name: str, start: int) -> bytes:
        """Some bytes of a file of the run from `start`; b"" at its end or where there is none."""
        return self._shell.read_from(self._directory / name, start)

    def end(self) -> list[int]:
        """End the whole group and wait until it is gone; returns the processes that run all the same, normally none."""
        nothing = f"{self._cd} || exit 0; if ! [ -e pid ]; then : > cancel; exit 0; fi"
        done = self._run(f"{nothing}; exec {self._supervise('--end')}", timeout_s=END_TIMEOUT_S)
        if done.exit_code != 0:
            raise HostError(f"[{self._shell.name}] could not end a stage: {last_line(done.stderr)}.", "Run again.")
        left: list[int] = json.loads(done.stdout)["left"] if done.stdout.strip() else []
        return left

    def remove(self) -> None:
        """Remove the directory once its supervisor is gone, which may take it a moment after exit.json."""
        wait = f"n=0; while alive && [ $n -lt {10 * REMOVE_WAIT_S} ]; do sleep 0.1; n=$((n + 1)); done\n"
        self._run((self._alive() + wait if self._supervisor else "") + f"rm -rf {shlex.quote(str(self._directory))}")

    def _require_lock(self) -> str:
        """A start that comes late, after a cut link, must not meet another's stage on the GPU that was ours. Started is started."""
        if self._gpu_lock is None:
            return ""
        file, token = map(shlex.quote, self._gpu_lock)
        return f"{{ [ -e pid ] || grep -qsF -e {token} -- {file} || {{ echo the GPU was given to another meanwhile >&2; exit 1; }}; }} && "

    def _supervise(self, *options: str) -> str:
        assignments = [f"{name}={value}" for name, value in self._variables.items()]
        module = ["-m", "dflash_model.stages.supervise", str(self._directory), *options]
        return f"env {shlex.join(assignments)} {program(self._python)} {shlex.join(module)} </dev/null"

    def _alive(self) -> str:
        assert self._supervisor is not None, "asked before it was started"
        return _ALIVE.format(**self._supervisor.to_json())

    def _run(self, script: str, *, timeout_s: float = CALL_TIMEOUT_S) -> Completed:
        return self._shell.run(script, timeout_s=timeout_s)
