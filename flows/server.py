"""A Prefect server of our own for one run, where the user has none: in a session of its own, on a free port, gone with us.

Prefect's own temporary server shares the terminal's process group: Ctrl-C would end it before the run could say how it
ended, and kill -9 of the run would leave it behind. Here `python -m flows.server PORT` holds the server and ends it when
its standard input, a pipe from the run, closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_model.errors import StageError

OWN_SERVER = "DFLASH_EVAL_OWN_SERVER"
"""Set while a run has a server of its own: its addresses mean nothing afterwards."""
START_S = 180.0
END_S = 15.0


@contextmanager
def prefect_server(log_path: Path) -> Iterator[str]:
    """The address of a Prefect API: the user's own ($PREFECT_API_URL), or a server that lives as long as the body.

    Sets $PREFECT_API_URL; call before `import prefect`. Raises StageError where the server does not come up.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield os.environ["PREFECT_API_URL"]
        return
    port = _free_port()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        command = [sys.executable, "-m", "flows.server", str(port)]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    assert holder.stdin is not None
    try:
        url = f"http://127.0.0.1:{port}/api"
        _wait_for(url, holder, log_path)
        os.environ |= {"PREFECT_API_URL": url, OWN_SERVER: "1"}
        yield url
    finally:
        for name in ("PREFECT_API_URL", OWN_SERVER):
            os.environ.pop(name, None)
        holder.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            holder.wait(timeout=2 * END_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(url: str, holder: subprocess.Popen[bytes], log_path: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if holder.poll() is not None:
            raise StageError(f"Prefect's server ended with code {holder.returncode} while starting.", f"Read {log_path}.")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise StageError(f"Prefect's server did not answer within {START_S:g} s.", f"Read {log_path}.")


def hold(port: int) -> int:
    """Run the server until standard input closes or it ends by itself; then end its group. Returns its exit code."""
    # Our own ending must not be interrupted: SIGTERM goes to the whole group, which is ours.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_default_sigterm)
    os.set_blocking(0, False)
    while server.poll() is None and not _input_closed():
        time.sleep(0.2)
    if server.poll() is None:
        os.killpg(0, signal.SIGTERM)
        try:
            server.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            os.killpg(0, signal.SIGKILL)
    return server.returncode or 0


def _default_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _input_closed() -> bool:
    try:
        return os.read(0, 1024) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    sys.exit(hold(int(sys.argv[1])))
