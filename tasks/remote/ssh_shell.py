"""SshShell: the Shell protocol over a Connection. Scripts may be of any length, and so may what they print."""

from __future__ import annotations

import secrets
from pathlib import PurePosixPath

from dflash_model.errors import StorageError
from dflash_model.parts import part_name
from tasks.remote.command import quote
from tasks.remote.connection import Connection
from tasks.remote.remote_script import POLL_S, RemoteScript, remote_script
from tasks.remote.shell import Completed
from tasks.remote.ssh_errors import script_failed

SMALL_FILE_S = 60.0
KEPT_BYTES = 256 << 20
"""Of stderr; stdout is kept whole."""

SHORT_WAIT_S = 0.02


class SshShell:
    """Scripts and small files on one host over SSH."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def name(self) -> str:
        """The host's name, for messages."""
        return self._connection.name

    def run(self, script: str, *, timeout_s: float, stdin: bytes = b"") -> Completed:
        """Run a POSIX sh script; past `timeout_s` it is killed with all it started. Raises HostError."""
        return self.run_for("running a script", script, timeout_s=timeout_s, stdin=stdin)

    def run_for(self, doing: str, script: str, *, timeout_s: float, stdin: bytes = b"") -> Completed:
        """`run`, saying in errors what it was for ("reading /a")."""
        with remote_script(self._connection, script, doing=doing, timeout_s=timeout_s, keep_bytes=KEPT_BYTES) as running:
            stdout = _exchange(running, stdin)
            code = running.finish()
            return Completed(exit_code=code, stdout=stdout, stderr=running.stderr)

    def read_from(self, path: PurePosixPath, offset: int, *, limit: int = 1 << 20) -> bytes:
        """Up to `limit` bytes of a file from `offset`; b"" at its end or where there is no file. Raises HostError."""
        file, doing = quote(path), f"reading {path}"
        script = f"export LC_ALL=C\n[ -e {file} ] || exit 0\ntail -c +{offset + 1} -- {file} | head -c {limit}\n"
        done = self.run_for(doing, script, timeout_s=SMALL_FILE_S)
        if done.exit_code != 0 or (done.stderr and not done.stdout):
            raise script_failed(self.name, doing, exit_code=done.exit_code, stderr=done.stderr)
        return done.stdout

    def write_small(self, path: PurePosixPath, content: bytes) -> None:
        """Write a small file whole (part, then rename), parents made. Raises HostError or StorageError."""
        doing = f"writing {path}"
        if not path.name:
            raise StorageError(f"[{self.name}] {path} is no file name.", "Give the path of a file.")
        part = path.with_name(part_name(f"{path.name}.{secrets.token_hex(4)}"))
        file, to = quote(part), quote(path)
        # A cut link ends the input early, and cat takes that for the end: so the size decides, not cat's exit code.
        script = (
            f"export LC_ALL=C\nmkdir -p -- {quote(path.parent)} || exit 1\n"
            f"[ -d {to} ] && {{ echo {to}: Is a directory >&2; exit 1; }}\n"
            f'cat > {file} && [ "$(wc -c < {file})" -eq {len(content)} ] && mv -f -- {file} {to} && exit 0\n'
            f"rm -f -- {file}\nexit 1\n"
        )
        done = self.run_for(doing, script, timeout_s=SMALL_FILE_S, stdin=content)
        if done.exit_code != 0:
            raise script_failed(self.name, doing, exit_code=done.exit_code, stderr=done.stderr)


def _exchange(running: RemoteScript, stdin: bytes) -> bytes:
    """Feed `stdin` and collect stdout at the same time: a script that answers while it reads must not block both sides."""
    answered = bytearray()
    sent, open_end = 0, True
    while sent < len(stdin):
        if running.can_send:
            count = running.send(stdin[sent : sent + (1 << 16)])
            if count < 0:
                break
            sent += count
        block = running.receive(0.0 if running.can_send else SHORT_WAIT_S)
        if block == b"":
            open_end = False
            break
        answered += block or b""
    running.close_stdin()
    while open_end and (block := running.receive(POLL_S)) != b"":
        answered += block or b""
    return bytes(answered)
