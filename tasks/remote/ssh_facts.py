"""Size, time and inode of files on a host: by its `stat` program, and by SFTP where that has none that we understand.

SFTP tells whole seconds and no inode, so a file overwritten within a second looks unchanged; `stat -c` tells both.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tasks.remote.command import quote
from tasks.remote.host import FileFacts
from tasks.remote.sftp_sessions import SftpSessions
from tasks.remote.ssh_errors import script_failed
from tasks.remote.ssh_shell import SshShell

PATHS_AT_ONCE = 100
FACTS_S = 60.0
_LINE = re.compile(rb"(\d+) (\d+) (\d+)(?:\.(\d{1,9})\d*)? ([0-9a-f]+)")
_SCRIPT = """export LC_ALL=C
printf '%s\\0' "$(stat -L -c '%i %s %.9Y %f' / 2>/dev/null)"
for path in {paths}; do
  said=$(stat -L -c '%i %s %.9Y %f' -- "$path" 2>&1) || case $said in
    *': No such file or directory' | *': Not a directory') said=none ;;
    *) said="! $said" ;;
  esac
  printf '%s\\0' "$said"
done
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """FileFacts and what else the mode tells."""

    facts: FileFacts
    """The facts."""

    is_regular: bool
    """True for a plain file: no directory, pipe or device."""


class SshFacts:
    """Facts about paths of one host."""

    def __init__(self, shell: SshShell, sessions: SftpSessions) -> None:
        self._shell = shell
        self._sessions = sessions
        self._has_stat = True

    def see(self, path: PurePosixPath) -> Seen | None:
        """What lies at `path`, symbolic links followed; None where nothing does. Raises EvalError."""
        return next(self.see_all([path]))

    def see_all(self, paths: Sequence[PurePosixPath]) -> Iterator[Seen | None]:
        """`see` of each path, in order, a hundred a round trip."""
        for begin in range(0, len(paths), PATHS_AT_ONCE):
            some = paths[begin : begin + PATHS_AT_ONCE]
            answers = self._by_stat(some) if self._has_stat else None
            yield from self._by_sftp(some) if answers is None else answers

    def _by_stat(self, paths: Sequence[PurePosixPath]) -> list[Seen | None] | None:
        """None where this host's `stat` does not speak our language."""
        doing = f"looking at {paths[0]}" + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        script = _SCRIPT.format(paths=" ".join(quote(path) for path in paths))
        done = self._shell.run_for(doing, script, timeout_s=FACTS_S)
        root, *answers = done.stdout.split(b"\0")[:-1] or [b""]
        if not _LINE.fullmatch(root):
            self._has_stat = False
            return None
        if done.exit_code != 0 or len(answers) != len(paths):
            raise script_failed(self._shell.name, doing, exit_code=done.exit_code, stderr=done.stderr)
        return [self._answer(path, answer) for path, answer in zip(paths, answers, strict=True)]

    def _answer(self, path: PurePosixPath, answer: bytes) -> Seen | None:
        if answer == b"none":
            return None
        match = _LINE.fullmatch(answer)
        if match is None:
            raise script_failed(self._shell.name, f"looking at {path}", exit_code=1, stderr=answer.removeprefix(b"! "))
        inode, size, seconds, fraction, mode = match.groups()
        mtime_ns = int(seconds) * 10**9 + int((fraction or b"0").ljust(9, b"0"))
        return _seen(path, int(mode, 16), size_bytes=int(size), mtime_ns=mtime_ns, inode=int(inode))

    def _by_sftp(self, paths: Sequence[PurePosixPath]) -> Iterator[Seen | None]:
        with self._sessions.session() as sftp:
            found = [sftp.stat(path) for path in paths]
        for path, told in zip(paths, found, strict=True):
            if told is None:
                yield None
            else:
                yield _seen(path, told.mode, size_bytes=told.size_bytes, mtime_ns=told.mtime_s * 10**9, inode=0)


def _seen(path: PurePosixPath, mode: int, *, size_bytes: int, mtime_ns: int, inode: int) -> Seen:
    facts = FileFacts(path=path, size_bytes=size_bytes, mtime_ns=mtime_ns, inode=inode, is_dir=stat.S_ISDIR(mode))
    return Seen(facts=facts, is_regular=stat.S_ISREG(mode))
