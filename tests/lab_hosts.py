"""Hosts of the lab, opened for one test, and what must hold when the test is over."""

import shutil
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

from lab import Lab, python_below_root
from namespaces import kill, soon

from tasks.remote.connection import Connection
from tasks.remote.endpoint import Endpoint, Timeouts, resolve_endpoint
from tasks.remote.host import OnEvent, StageRun
from tasks.remote.ssh_host import SshHost
from tasks.remote.ssh_shell import SshShell

QUICK = Timeouts(connect=3, banner=5, auth=5, channel=5, io=2, keepalive=1, stall=5)
"""Silence is noticed within `keepalive` + `io` = 3 s."""

NOTICED_S = QUICK.keepalive + QUICK.io + 1.5
"""That, and what a busy machine needs to say so."""

NO_CONFIG = Path("/nonexistent/ssh_config")


class NoRunner:
    """For hosts that run no stage here."""

    def run(self, request: Any, *, log_path: Path, deadline_s: float, on_event: OnEvent) -> StageRun:
        raise AssertionError("no stage is run here")


class LabHosts:
    """What a test opens in the lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._open: list[SshHost | Connection] = []
        self._train_before: dict[str, tuple[int, int]] | None = None

    def endpoint(self, name: str, *, timeouts: Timeouts = QUICK, **given: Any) -> Endpoint:
        """The endpoint of a lab host with the lab's key, straight or as given."""
        default = {"user": "root", "key": self.lab.key, "known_hosts": (self.lab.known_hosts,), "config_path": NO_CONFIG}
        return resolve_endpoint(name, hostname=self.lab.hosts[name].address, timeouts=timeouts, **(default | given))

    def connection(self, name: str, **given: Any) -> Connection:
        """A connection of its own."""
        if name == "train" and self._train_before is None:
            self._train_before = self.lab.files("train")
        connection = Connection(self.endpoint(name, **given))
        self._open.append(connection)
        return connection

    def host(self, name: str, *, work: str = "", **given: Any) -> SshHost:
        """A host; `work`: below the lab's work tree."""
        connection = self.connection(name, **given)
        host = SshHost(connection, PurePosixPath(self.lab.work / work), runner=NoRunner())
        self._open.append(host)
        return host

    def shell(self, name: str, **given: Any) -> SshShell:
        """A shell on a connection of its own."""
        return SshShell(self.connection(name, **given))

    def put(self, name: str, path: str, content: bytes) -> PurePosixPath:
        """A file below the work tree, written from outside; the path as the host has it."""
        file = self.lab.disk(name) / "work" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        return PurePosixPath(self.lab.work / path)

    def on_disk(self, name: str, path: PurePosixPath) -> Path:
        """The same file as seen from outside."""
        return self.lab.disk(name) / "work" / path.relative_to(self.lab.work)

    def sessions(self, name: str) -> list[int]:
        """The processes of sshd that serve a connection."""
        return [pid for pid, line in self.lab.processes(name).items() if line.startswith("sshd: root@")]

    def close(self) -> None:
        """End all connections."""
        for opened in self._open:
            opened.close()

    def expect_clean(self) -> None:
        """Every host runs, none has a process or a part of ours, and train holds what it held. Then all disks are emptied."""
        try:
            for name in self.lab.hosts:
                assert soon(lambda name=name: self.lab.processes(name) == {}, 7), f"left on {name}: {self.lab.processes(name)}"
                parts = [path for path in self.lab.files(name) if ".part" in path]
                assert parts == [], f"left on {name}: {parts}"
            if self._train_before is not None:
                assert self.lab.files("train") == self._train_before
        finally:
            python = python_below_root()
            for name in self.lab.hosts:
                kill(list(self.lab.processes(name)))
                for tree in ("work", "root"):
                    for path in (self.lab.disk(name) / tree).iterdir():
                        if tree == "root" and python is not None and path.name == python.relative_to("/root").parts[0]:
                            continue  # where the host still sees this Python
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def make_key(directory: Path, *, passphrase: str = "") -> Path:
    """A new Ed25519 key."""
    path = directory / f"key-{'open' if not passphrase else 'locked'}"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path)], check=True, capture_output=True)
    return path
