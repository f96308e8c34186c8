"""The lab: several hosts on one machine, each with a real sshd, that reach the relay and nothing else.

    python deployments/lab/lab.py up|down|status [--state DIR]

Each host has its own network (10.99.N.0/24), processes, host name, /root, /run and work tree; it shares the kernel, /usr and
/tmp. Needs root, iproute2 and openssh-server. Labs live side by side, each in a directory of its own: instances.py tells them
apart. `up` writes STATE/hosts.yaml for `dflash-eval run --hosts`; that lab stays until `down`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import instances
from instances import MARK, Instance
from namespaces import command_lines, first_process, kill, listens, namespaces, processes, run, soon

STATE = Path("/tmp/dflash-lab")
PORTS = (22, 2222)
ROLES = {"train": "train", "eval": "eval", "gpu-a": "target", "gpu-b": "target"}
HOSTS = tuple(ROLES)
SFTP_SERVERS = ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
_BOOT = """set -e
hostname {name}
{mount_work}
{keep_python}mount --rbind {disk}/root /root
mount -t tmpfs tmpfs {disks}
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
mkdir -p /run/sshd
cd /root
exec {sshd} -D -e -f {config}
"""


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """One host of the lab."""

    name: str
    """Its host name."""

    slot: int
    """Number of its lab."""

    number: int
    """Its number there, from 1 to 7."""

    behind: str | None = None
    """The host that alone can reach it; None: the relay."""

    only_jumps: bool = False
    """It forwards connections and runs no commands."""

    @property
    def address(self) -> str:
        """Where its sshd listens."""
        return f"10.99.{self.subnet}.2"

    @property
    def subnet(self) -> int:
        """N of 10.99.N.0/24; the relay's end of its cable has .1."""
        return self.slot * 8 + self.number

    @property
    def namespace(self) -> str:
        """Name of its network namespace, and of the relay's end of its cable."""
        return instances.prefix(self.slot) + self.name


def why_impossible() -> str | None:
    """What this machine lacks for a lab, None where nothing."""
    if os.geteuid() != 0:
        return "the lab needs root"
    programs = ("ip", "unshare", "setsid", "ssh-keygen", "mount")
    lacking = [name for name in programs if shutil.which(name) is None] + ([] if _sshd() else ["sshd"])
    return f"the lab needs {', '.join(lacking)}" if lacking else None


class Lab:
    """All hosts, and what can happen to them."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.work = state / "work"
        self.key = state / "keys" / "id_ed25519"
        self.known_hosts = state / "known_hosts"
        self.hosts_file = state / "hosts.yaml"
        self.hosts: dict[str, LabHost] = {}
        self._instance: Instance | None = None

    def up(self, *, keep: bool = False) -> None:
        """Start all hosts. `keep`: they outlive this process; else whoever starts a lab next removes them once it is dead.

        A kept lab in the same directory is started anew. Raises RuntimeError where the directory is somebody's.
        """
        if self.state.exists() and any(self.state.iterdir()) and not (self.state / MARK).exists():
            raise RuntimeError(f"{self.state} holds something that is not a lab; name an empty directory")
        instances.sweep()
        self.down()
        self._instance = instances.free()
        self._instance.note(self.state, kept=keep)
        for directory in (self.work, self.key.parent, self.state / "disks", self.state / "hosts"):
            directory.mkdir(parents=True, exist_ok=True)
        (self.state / MARK).touch()
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(self.key))
        for name in HOSTS:
            self.add(name)
        for name in HOSTS:
            self._wait_ready(name)
        self.hosts_file.write_text(self._inventory())

    def down(self) -> None:
        """End every process of every host of the lab in this directory and remove all traces. Raises RuntimeError."""
        instance = self._instance or instances.of(self.state)
        self._instance = None
        self.hosts.clear()
        if instance is not None:
            instance.clear()
            instance.release()
        if (self.state / MARK).exists():
            shutil.rmtree(self.state)

    def add(self, name: str, *, behind: str | None = None, only_jumps: bool = False) -> LabHost:
        """Wire up and start one more host; `behind`: its cable goes to that host instead of the relay."""
        assert self._instance is not None, "up() comes first"
        slot, number = self._instance.slot, len(self.hosts) + 1
        host = LabHost(name=name, slot=slot, number=number, behind=behind, only_jumps=only_jumps)
        self.hosts[name] = host
        for tree in ("work", "root"):
            (self.disk(name) / tree).mkdir(parents=True)
        (self.state / "hosts" / name).mkdir()
        self._make_host_key(name)
        near, gateway = (["-n", self.hosts[behind].namespace], f"to-{name}") if behind else ([], host.namespace)
        run("ip", "netns", "add", host.namespace)
        run("ip", *near, "link", "add", gateway, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        run("ip", *near, "addr", "add", f"10.99.{host.subnet}.1/24", "dev", gateway)
        run("ip", *near, "link", "set", gateway, "up")
        run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            run("ip", "-n", host.namespace, "link", "set", link, "up")
        self._start(name)
        return host

    def kill(self, name: str) -> None:
        """A power cut: the network falls silent, then every process is gone. What was written stays."""
        self.cut_link(name)
        kill(processes(self.hosts[name].namespace))

    def restart(self, name: str, *, work_mib: int | None = None) -> None:
        """Start a host anew; `work_mib`: with an empty disk of that size as its work tree, until the next restart."""
        self.kill(name)
        self._start(name, work_mib=work_mib)
        self.mend_link(name)
        self._wait_ready(name)

    def cut_link(self, name: str) -> None:
        """Pull the cable at the host's end: the relay hears nothing any more, and no error either."""
        run("ip", "-n", self.hosts[name].namespace, "link", "set", "eth0", "down")

    def mend_link(self, name: str) -> None:
        """Plug it in again."""
        run("ip", "-n", self.hosts[name].namespace, "link", "set", "eth0", "up")

    def change_host_key(self, name: str) -> None:
        """Set the host up anew, as it were; known_hosts keeps the old key."""
        known = self.known_hosts.read_text()
        self._make_host_key(name)
        self.known_hosts.write_text(known)
        self.restart(name)

    def set_profile(self, name: str, text: str) -> None:
        """Write root's ~/.bashrc there; "" removes it."""
        profile = self.disk(name) / "root" / ".bashrc"
        profile.write_text(text)
        if not text:
            profile.unlink()

    def disk(self, name: str) -> Path:
        """The host's disk as the relay's file system sees it: `work` and `root`."""
        return self.state / "disks" / name

    def view(self, name: str) -> Path:
        """The root directory as the host's own processes see it. Only while it runs."""
        first = first_process(self.hosts[name].namespace)
        if first is None:
            raise RuntimeError(f"lab host {name} does not run; see {self.state / 'hosts' / name / 'log'}")
        return Path(f"/proc/{first}/root")

    def files(self, name: str) -> dict[str, tuple[int, int]]:
        """path -> (size, mtime_ns) of everything below the work tree and /root of a host that runs."""
        view = self.view(name)
        python = python_below_root()
        found = {}
        for top in (self.work, Path("/root")):
            for directory, names, files in os.walk(view / top.relative_to("/")):
                here = Path("/") / Path(directory).relative_to(view)
                names[:] = [name for name in names if here / name != python]
                for entry in (*names, *files):
                    facts = (Path(directory) / entry).lstat()
                    found[str(here / entry)] = (facts.st_size, facts.st_mtime_ns)
        return found

    def processes(self, name: str) -> dict[int, str]:
        """pid -> command line of every process of a host but its listening sshd."""
        return command_lines(self.hosts[name].namespace)

    def _start(self, name: str, *, work_mib: int | None = None) -> None:
        host, place = self.hosts[name], self.state / "hosts" / name
        (place / "sshd_config").write_text(self._sshd_config(host))
        source = f"-t tmpfs -o size={work_mib}m tmpfs" if work_mib else f"--bind {self.disk(name)}/work"
        script = _BOOT.format(
            name=name, mount_work=f"mount {source} {self.work}", disk=self.disk(name), disks=self.state / "disks",
            keep_python=_keep_python(self.disk(name)),
            sshd=_sshd(), config=place / "sshd_config",
        )  # fmt: skip
        own = ["--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        # setsid --fork: the host belongs to nobody here, so `up` may end while it runs on.
        command = ["ip", "netns", "exec", host.namespace, "setsid", "--fork", "unshare", *own, "sh", "-c", script]
        plain = {"PATH": os.environ["PATH"], "HOME": "/root"}
        with (place / "log").open("ab") as log:
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=plain, check=True)

    def _wait_ready(self, name: str) -> None:
        if not soon(lambda: listens(self.hosts[name].namespace, PORTS[0])):
            raise RuntimeError(f"lab host {name} does not start; see {self.state / 'hosts' / name / 'log'}")

    def _make_host_key(self, name: str) -> None:
        key, address = self.state / "hosts" / name / "host_key", self.hosts[name].address
        key.unlink(missing_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        kind, blob = key.with_suffix(".pub").read_text().split()[:2]
        with self.known_hosts.open("a") as known:
            known.writelines(f"{address if port == 22 else f'[{address}]:{port}'} {kind} {blob}\n" for port in PORTS)

    def _sshd_config(self, host: LabHost) -> str:
        listen = "".join(f"ListenAddress {host.address}:{port}\n" for port in PORTS)
        sftp = next(path for path in SFTP_SERVERS if Path(path).exists())
        rule = "ForceCommand echo this host only forwards; exit 1\n" if host.only_jumps else "AllowTcpForwarding no\n"
        return (
            f"{listen}HostKey {self.state}/hosts/{host.name}/host_key\nAuthorizedKeysFile {self.key}.pub\nPidFile none\n"
            "UsePAM no\nStrictModes no\nUseDNS no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nPrintMotd no\nClientAliveInterval 2\nClientAliveCountMax 2\nSubsystem sftp {sftp}\n{rule}"
        )

    def _inventory(self) -> str:
        lines = ["# The lab's hosts; written by lab.py.", "hosts:"]
        for name, role in ROLES.items():
            runs = "" if role == "train" else f", threads: 1, slots: {2 if role == 'eval' else 1}, python: {sys.executable}"
            lines.append(
                f"  {name}: {{via: ssh, hostname: {self.hosts[name].address}, user: root, key: keys/id_ed25519,"
                f" known_hosts: known_hosts, work_dir: {self.work}, roles: [{role}]{runs}}}"
            )
        return "\n".join([*lines, ""])


def python_below_root() -> Path | None:
    """The running Python's own directory where it lies below /root, which each host has of its own; None elsewhere."""
    base = Path(sys.base_prefix).resolve()
    return base if base.is_relative_to("/root") else None


def _keep_python(disk: Path) -> str:
    """Commands that show this Python to a host at its usual place, for virtual environments that point there."""
    base = python_below_root()
    if base is None:
        return ""
    place = disk / "root" / base.relative_to("/root")
    return f"mkdir -p {place}\nmount --bind -o ro {base} {place}\n"


def _sshd() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("up", "down", "status"))
    parser.add_argument("--state", type=Path, default=STATE, help=f"where keys, disks and logs lie (default: {STATE})")
    options = parser.parse_args()
    reason = why_impossible()
    if reason is not None:
        print(f"{reason}.", file=sys.stderr)
        return 2
    lab = Lab(options.state.resolve())
    if options.command == "up":
        lab.up(keep=True)
        print(f"{len(lab.hosts)} hosts are up: {lab.hosts_file}")
    elif options.command == "down":
        lab.down()
    else:
        for state, slot in instances.listed():
            hosts = [f"{n.partition('-')[2]} {len(processes(n))} processes" for n in namespaces(instances.prefix(slot))]
            print(f"{state}: {', '.join(hosts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
