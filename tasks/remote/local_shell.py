"""LocalShell: the Shell protocol on the machine that runs the flow, for hosts that are directories of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path, PurePosixPath

from dflash_model.errors import HostError, from_os_error
from dflash_model.stages.process_groups import KILL_GRACE_S
from dflash_model.storage import write_file
from tasks.remote.shell import Completed


class LocalShell:
    """Scripts and small files on this machine, as the user who runs the flow."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """The host's name, for messages."""
        return self._name

    def run(self, script: str, *, timeout_s: float, stdin: bytes = b"") -> Completed:
        """Run a POSIX sh script of at most 128 KiB; past `timeout_s` it is killed with all it started. Raises HostError."""
        pipe = subprocess.PIPE
        try:
            child = subprocess.Popen(
                ["/bin/sh", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, cwd="/", start_new_session=True
            )
        except OSError as exc:
            raise HostError(
                f"[{self._name}] a script could not be started: {exc.strerror}.", "Look at that machine's load."
            ) from exc
        with ExitStack() as unless_done:
            unless_done.callback(_kill, child)
            try:
                stdout, stderr = child.communicate(stdin, timeout=timeout_s)
            except subprocess.TimeoutExpired as exc:
                raise HostError(
                    f"[{self._name}] a script did not end within {timeout_s:g} s.", "Look at that machine's load, then run again."
                ) from exc
            unless_done.pop_all()
        return Completed(exit_code=child.returncode, stdout=stdout, stderr=stderr)

    def read_from(self, path: PurePosixPath, offset: int, *, limit: int = 1 << 20) -> bytes:
        """Up to `limit` bytes of a file from `offset`; b"" at its end or where there is no file. Raises EvalError."""
        try:
            with Path(path).open("rb") as file:
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""
        except OSError as exc:
            raise from_os_error(exc, f"[{self._name}] reading {path}") from exc

    def write_small(self, path: PurePosixPath, content: bytes) -> None:
        """Write a small file whole (part, then rename), parents made. Raises EvalError."""
        write_file(Path(path), content)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """The script and all it started. Its pipes are closed unread: whoever left its group may hold them open for ever."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=KILL_GRACE_S)
