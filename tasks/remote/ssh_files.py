"""Files of one host over SSH: found by SFTP and `stat`, moved through `cat`, hashed where they lie.

A stream that ends is no proof of a whole file: a cut link looks the same. What was moved is counted, and the exit status
must have come.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import PurePosixPath

from dflash_model.checkpoint.directory import ByteDirectory
from dflash_model.checkpoint.source import ByteSource
from dflash_model.errors import EvalError, HostError
from tasks.remote.command import quote
from tasks.remote.connection import Connection
from tasks.remote.host import FileFacts
from tasks.remote.remote_script import RemoteScript, remote_script
from tasks.remote.sftp_sessions import SftpSessions
from tasks.remote.ssh_errors import AGAIN, script_failed
from tasks.remote.ssh_facts import SshFacts
from tasks.remote.ssh_glob import Entry, candidates
from tasks.remote.ssh_shell import SshShell
from tasks.remote.ssh_source import SourcePlace, open_directory, open_source
from tasks.remote.throttle import Throttle

log = logging.getLogger(__name__)

SHORT_S = 60.0
LONG_S = 600.0
"""For what may touch many files or wait for a disk: sync, rm -r."""

SLOWEST_BYTES_PER_S = 10 << 20
"""A disk that hashes slower than this is stuck."""

NO_PROGRAM = 97
_C = "export LC_ALL=C\n"
_SHA256 = """if command -v sha256sum >/dev/null 2>&1; then exec sha256sum < {file}
elif command -v shasum >/dev/null 2>&1; then exec shasum -a 256 < {file}
elif command -v openssl >/dev/null 2>&1; then exec openssl dgst -sha256 < {file}
else exit 97; fi
"""
_HASH = """if command -v sha256sum >/dev/null 2>&1; then hash() { sha256sum; }
elif command -v shasum >/dev/null 2>&1; then hash() { shasum -a 256; }
elif command -v openssl >/dev/null 2>&1; then hash() { openssl dgst -sha256; }
else exit 97; fi
"""
_WRITE = """mkdir -p -- {directory} && cat > {file} || exit 1
if sync --help 2>&1 | grep -q FILE; then sync {file} || exit 1; fi
wc -c < {file}
"""
_CONTINUE = """dd if=/dev/null of={file} bs=1 seek={offset} 2>/dev/null || exit 1
cat >> {file} || exit 1
if sync --help 2>&1 | grep -q FILE; then sync {file} || exit 1; fi
wc -c < {file}
"""
"""dd with nothing to copy cuts the file at `offset`: an earlier `cat` may have written on after it was asked for its size."""
_RENAME = """mkdir -p -- {directory} || exit 1
if [ -d {to} ] && [ ! -L {to} ]; then echo {to}': Is a directory' >&2; exit 1; fi
if mv --help 2>&1 | grep -q no-target-directory; then exec mv -f -T -- {file} {to}; else exec mv -f -- {file} {to}; fi
"""
_DF = re.compile(r"\s\d+\s+\d+\s+(-?\d+)\s+(?:\d+%|-)\s")


class SshFiles:
    """What the Host protocol asks of files, for one connection."""

    def __init__(self, connection: Connection, *, throttle: Throttle | None = None) -> None:
        self._connection = connection
        self._throttle = throttle or Throttle(None)
        self._sessions = SftpSessions(connection)
        self.shell = SshShell(connection)
        self._facts = SshFacts(self.shell, self._sessions)
        self._place = SourcePlace(self.name, self._sessions, self._facts, self.sha256, self._throttle)

    @property
    def name(self) -> str:
        """The host's name."""
        return self._connection.name

    def stat(self, path: PurePosixPath) -> FileFacts | None:
        """Facts of a file or directory, None where there is nothing. Raises EvalError."""
        seen = self._facts.see(path)
        return None if seen is None else seen.facts

    def glob(self, pattern: str, *, start: PurePosixPath) -> list[FileFacts]:
        """Facts of everything that matches a shell pattern, sorted by path; relative patterns begin at `start`. Raises EvalError."""
        with self._sessions.session() as sftp:

            def listing(directory: PurePosixPath) -> list[Entry]:
                return [Entry(name, told.is_dir, told.is_link) for name, told in sftp.listing(directory)]

            paths = sorted(candidates(pattern, start=start, listing=listing))
        found = [seen.facts for seen in self._facts.see_all(paths) if seen is not None]
        return [facts for facts in found if facts.is_dir or not pattern.endswith("/")]

    def open_source(self, path: PurePosixPath) -> AbstractContextManager[ByteSource]:
        """Random read access to one file, opened once. Raises CheckpointError, StorageError, HostError when entered."""
        return open_source(self._place, path)

    def open_directory(self, path: PurePosixPath) -> AbstractContextManager[ByteDirectory]:
        """Random read access to the files of one directory over one session. Raises HostError when entered."""
        return open_directory(self._place, path)

    def read_blocks(self, path: PurePosixPath, *, offset: int = 0) -> Iterator[bytes]:
        """The file's bytes from `offset` on, in order, in blocks of up to a window. Raises EvalError."""
        doing = f"reading {path}"
        script = f"{_C}exec tail -c +{offset + 1} -- {quote(path)}\n" if offset else f"{_C}exec cat -- {quote(path)}\n"
        with remote_script(self._connection, script, doing=doing) as running:
            while block := running.read():
                yield block
                self._throttle.moved(len(block))
                running.allow(None)  # what the limit held up is no stall
            self._require_success(running, doing)

    def write_blocks(self, path: PurePosixPath, blocks: Iterable[bytes], *, offset: int = 0, keep: bool = False) -> None:
        """Create or replace a file, or go on behind its first `offset` bytes; synced when this returns where that host can.

        Parents are made. `keep`: what arrived before an error stays. Raises EvalError.
        """
        whole = False
        try:
            self._write(path, blocks, offset)
            whole = True
        finally:
            if not whole and not keep:
                self._remove_quietly(path)

    def _write(self, path: PurePosixPath, blocks: Iterable[bytes], offset: int) -> None:
        doing = f"writing {path}"
        template = _CONTINUE if offset else _WRITE
        script = _C + template.format(directory=quote(path.parent), file=quote(path), offset=offset)
        sent = offset
        with remote_script(self._connection, script, doing=doing) as running:
            for block in blocks:
                if not self._send(running, block):
                    break
                sent += len(block)
            running.close_stdin()
            running.allow(LONG_S)
            answer = b"".join(iter(running.read, b""))
            self._require_success(running, doing)
        if not answer.strip().isdigit() or int(answer) != sent:
            raise HostError(f"[{self.name}] {sent} bytes were sent while {doing}, {answer.decode().strip()} arrived.", AGAIN)

    def _send(self, running: RemoteScript, block: bytes) -> bool:
        """`running.write`, at the host's pace."""
        step = self._throttle.step_bytes
        for begin in range(0, len(block), step):
            part = block[begin : begin + step] if len(block) > step else block
            if not running.write(part):
                return False
            self._throttle.moved(len(part))
            running.allow(None)
        return True

    def _require_success(self, running: RemoteScript, doing: str) -> None:
        code = running.finish()
        if code != 0:
            raise script_failed(self.name, doing, exit_code=code, stderr=running.stderr)

    def _remove_quietly(self, path: PurePosixPath) -> None:
        """Remove what a failed write left, but never a directory that stood in its way; on a cut link, when it is mended."""
        script = f"rm -f -- {quote(path)}\n"
        if not self._connection.is_alive:
            self._connection.later(script)
            return
        try:
            self._run(f"removing {path}", script, timeout_s=SHORT_S)
        except HostError:
            self._connection.later(script)
        except EvalError as exc:
            log.debug("%s", exc)

    def sha256(self, path: PurePosixPath) -> str:
        """sha256 of a file, computed on its host, or here from its bytes where that has no program for it. Raises EvalError."""
        doing = f"hashing {path}"
        seen = self._facts.see(path)
        size = seen.facts.size_bytes if seen is not None else 0
        script = _C + _SHA256.format(file=quote(path))
        done = self.shell.run_for(doing, script, timeout_s=SHORT_S + size / SLOWEST_BYTES_PER_S)
        if done.exit_code == NO_PROGRAM:
            digest = hashlib.sha256()
            for block in self.read_blocks(path):
                digest.update(block)
            return digest.hexdigest()
        match = re.search(rb"\b[0-9a-f]{64}\b", done.stdout)
        if done.exit_code != 0 or match is None:
            raise script_failed(self.name, doing, exit_code=done.exit_code, stderr=done.stderr)
        return match.group().decode()

    def range_sha256(self, path: PurePosixPath, ranges: Sequence[tuple[int, int]]) -> list[str] | None:
        """sha256 of each (offset, size) of a file, computed on its host; None where that has no program for it. Raises EvalError."""
        doing = f"hashing parts of {path}"
        lines = [_C, _HASH, f"f={quote(path)}", '[ -f "$f" ] || { echo "$f: No such file or directory" >&2; exit 1; }']
        # tail seeks in a regular file; its complaint about the pipe that head has closed is no news.
        lines += [f'tail -c +{offset + 1} -- "$f" 2>/dev/null | head -c {size} | hash || exit 1' for offset, size in ranges]
        limit_s = SHORT_S + sum(size for _, size in ranges) / SLOWEST_BYTES_PER_S
        script = "\n".join([*lines, ""]).encode("utf-8", "surrogateescape")
        done = self.shell.run_for(doing, "exec sh -s", stdin=script, timeout_s=limit_s)
        if done.exit_code == NO_PROGRAM:
            return None
        found = [match.decode() for match in re.findall(rb"\b[0-9a-f]{64}\b", done.stdout)]
        if done.exit_code != 0 or len(found) != len(ranges):
            raise script_failed(self.name, doing, exit_code=done.exit_code, stderr=done.stderr)
        return found

    def join(self, path: PurePosixPath, others: Sequence[PurePosixPath]) -> None:
        """Append the content of `others`, in order, to the file at `path`, and remove each once it is. Raises EvalError."""
        whole = quote(path)
        steps = [f"cat -- {quote(other)} >> {whole} && rm -f -- {quote(other)} || exit 1\n" for other in others]
        sync = f"if sync --help 2>&1 | grep -q FILE; then sync {whole} || exit 1; fi\n"
        size = sum(seen.facts.size_bytes for seen in self._facts.see_all(list(others)) if seen is not None)
        self._run(f"joining {path}", _C + "".join(steps) + sync, timeout_s=LONG_S + size / SLOWEST_BYTES_PER_S)

    def rename(self, path: PurePosixPath, to: PurePosixPath) -> None:
        """Atomic rename; a file at `to` is replaced, a directory is an error. Parents of `to` are made. Raises EvalError."""
        script = _C + _RENAME.format(directory=quote(to.parent), file=quote(path), to=quote(to))
        self._run(f"renaming {path} to {to}", script, timeout_s=SHORT_S)

    def remove(self, path: PurePosixPath) -> None:
        """Remove a file or a whole directory; nothing there is fine. Raises EvalError."""
        self._run(f"removing {path}", f"{_C}exec rm -rf -- {quote(path)}\n", timeout_s=LONG_S)

    def free_bytes(self, directory: PurePosixPath) -> int:
        """Free space at a directory, which is made. Raises EvalError."""
        doing = f"asking for free space at {directory}"
        script = f"{_C}mkdir -p -- {quote(directory)} && df -Pk -- {quote(directory)} | tail -n 1\n"
        answer = self._run(doing, script, timeout_s=SHORT_S)
        match = _DF.search(answer.decode("utf-8", "replace"))
        if match is None:
            raise HostError(f"[{self.name}] df gave no figure while {doing}: {answer!r}.", "Look at `df -Pk` on that host.")
        return max(0, int(match.group(1))) * 1024

    def close(self) -> None:
        """End the idle SFTP session."""
        self._sessions.close()

    def _run(self, doing: str, script: str, *, timeout_s: float) -> bytes:
        done = self.shell.run_for(doing, script, timeout_s=timeout_s)
        if done.exit_code != 0:
            raise script_failed(self.name, doing, exit_code=done.exit_code, stderr=done.stderr)
        return done.stdout
