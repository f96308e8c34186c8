"""Removing from a host what killed writers left there: stages of its own, and relays that wrote to it. dflash_model/parts.py
looks and removes there; whether a relay on this machine lives is known here. What cannot be told goes once it is a day old.
"""

from __future__ import annotations

import functools
import json
import logging
import shlex
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from dflash_model.errors import EvalError, HostError
from dflash_model.parts import STALE_AFTER_S, is_dead
from tasks.remote.code import last_line
from tasks.remote.command import program
from tasks.remote.shell import Shell

log = logging.getLogger(__name__)

KEPT_CODES = 3
"""Unpacked programs that stay on a host, whatever their age."""

SWEEP_TIMEOUT_S = 60.0
MOST_AT_ONCE = 200


def sweep_host(shell: Shell, *, work_dir: PurePosixPath, python: str) -> int:
    """Remove dead parts and old programs below `work_dir`; returns how many. A host that does not do it is only logged."""
    try:
        found = _call(shell, python, {"do": "look", "work_dir": str(work_dir), "kept_codes": KEPT_CODES})["found"]
        gone = [path for path, writer, dead, age_s in found if _is_over(writer, dead, age_s)]
        for begin in range(0, len(gone), MOST_AT_ONCE):
            some = gone[begin : begin + MOST_AT_ONCE]
            _call(shell, python, {"do": "remove", "work_dir": str(work_dir), "paths": some})
            log.info("[%s] removed what was left unfinished: %s", shell.name, ", ".join(some))
    except EvalError as exc:
        log.warning("not swept: %s", exc.problem)
        return 0
    return len(gone)


def _is_over(writer: str | None, dead: bool | None, age_s: float) -> bool:
    known = is_dead(writer) if dead is None else dead
    return age_s > STALE_AFTER_S if known is None else known


def _call(shell: Shell, python: str, order: dict[str, Any]) -> dict[str, Any]:
    script = f"exec {program(python)} {shlex.join(['-I', '-', json.dumps(order)])}"
    done = shell.run(script, timeout_s=SWEEP_TIMEOUT_S, stdin=_program())
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as exc:
        raise HostError(
            f"[{shell.name}] {python} cannot sweep {order['work_dir']}: {last_line(done.stderr)}.", "Check `python` of that host."
        ) from exc
    return answer


@functools.lru_cache(maxsize=1)
def _program() -> bytes:
    return files("dflash_model").joinpath("parts.py").read_bytes()
