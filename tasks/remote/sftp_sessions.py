"""SFTP sessions of one host, each lent to one thread at a time.

The server program is started by a script, behind its marker, because the SFTP subsystem of sshd goes through the login
shell and breaks when a profile prints anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tasks.remote.connection import Connection
from tasks.remote.remote_script import remote_script
from tasks.remote.sftp import Sftp

SERVERS = (
    "/usr/lib/openssh/sftp-server",
    "/usr/libexec/openssh/sftp-server",
    "/usr/libexec/sftp-server",
    "/usr/lib/ssh/sftp-server",
    "/usr/lib64/ssh/sftp-server",
    "/usr/lib/sftp-server",
    "/usr/local/libexec/sftp-server",
)
DOING = "speaking SFTP"


class SftpSessions:
    """One idle session is kept, so that most questions cost one round trip."""

    def __init__(self, connection: Connection, *, servers: tuple[str, ...] = SERVERS) -> None:
        self._connection = connection
        self._servers = servers
        self._guard = threading.Lock()
        self._idle: tuple[Sftp, ExitStack] | None = None

    @contextmanager
    def session(self) -> Iterator[Sftp]:
        """A session for the body alone. Raises HostError where none can be opened."""
        sftp, closing = self._take() or self._open()
        try:
            yield sftp
        finally:
            with self._guard:
                keep = sftp.is_usable and self._idle is None
                if keep:
                    self._idle = (sftp, closing)
            if not keep:
                closing.close()

    def close(self) -> None:
        """End the idle session."""
        idle = self._take()
        if idle is not None:
            idle[1].close()

    def _take(self) -> tuple[Sftp, ExitStack] | None:
        with self._guard:
            idle, self._idle = self._idle, None
        if idle is not None and not idle[0].is_usable:
            idle[1].close()
            return None
        return idle

    def _open(self) -> tuple[Sftp, ExitStack]:
        names = " ".join(self._servers)
        script = f'for p in {names}; do if [ -x "$p" ]; then echo found; exec "$p"; fi; done\necho none\n'
        limit_s = self._connection.endpoint.timeouts.channel
        with ExitStack() as stack:
            stream = stack.enter_context(remote_script(self._connection, script, doing=DOING, timeout_s=limit_s))
            if stream.read() != b"found\n":
                stack.close()
                stream = stack.enter_context(remote_script(self._connection, None, doing=DOING, timeout_s=limit_s))
            stream.spare()
            sftp = Sftp(stream, host=self._connection.name)
            stream.allow(None)
            return sftp, stack.pop_all()
