"""`hosts check`: what each host has, in one short script a host, and which hosts reach each other. Nothing is written anywhere."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from dflash_model.errors import EvalError, HostError
from tasks.remote.connection import Connection
from tasks.remote.gpu_lock import lock_sentence
from tasks.remote.inventory import RELAY, SSH, HostEntry, Inventory
from tasks.remote.local_shell import LocalShell
from tasks.remote.opening import REMOTE_PYTHON, endpoint_of
from tasks.remote.packages import HostPackages, probe_packages
from tasks.remote.shell import Shell
from tasks.remote.ssh_shell import SshShell

SCRIPT_TIMEOUT_S = 60.0
REACH_TIMEOUT_S = 3
_FACTS = """
echo "time $(date +%s.%N)"
echo "cores $(nproc 2>/dev/null || echo ?)"
echo "load $(cut -d' ' -f1 /proc/loadavg 2>/dev/null || echo ?)"
echo "memory $(awk '/MemAvailable/ {{print $2*1024}}' /proc/meminfo 2>/dev/null || echo ?)"
d={work_dir}; while [ ! -d "$d" ]; do d=$(dirname "$d"); done
echo "disk $(df -Pk "$d" | awk 'NR==2 {{print $4*1024}}')"
[ -w "$d" ] && echo "writable yes" || echo "writable no"
nvidia-smi --query-gpu=name,memory.free,memory.total --format=csv,noheader,nounits 2>/dev/null | sed 's/^/gpu /'
for l in {work_dir}/locks/*; do [ -e "$l" ] && echo "lock $(basename "$l") $(tr '\\n' ' ' < "$l")"; done
true
"""


@dataclass(kw_only=True, slots=True)
class HostReport:
    """What one host answered; None and () where it did not."""

    name: str
    """Host of the inventory."""

    via: str
    """How it is reached."""

    problem: EvalError | None = None
    """Why it cannot be used at all."""

    clock_skew_s: float | None = None
    """Its clock minus ours."""

    cores: str = "?"
    """CPU cores."""

    load: str = "?"
    """Load of the last minute."""

    memory_bytes: float | None = None
    """Memory that programs can still get."""

    disk_bytes: float | None = None
    """Free at the work directory."""

    writable: bool | None = None
    """Whether the work directory can be written."""

    gpus: list[str] = field(default_factory=list)
    """"name, free MiB, total MiB" of each."""

    locks: list[str] = field(default_factory=list)
    """Locks held there, with holder and expiry."""

    packages: HostPackages | None = None
    """Python and packages; None for a host that runs no stage."""

    packages_problem: str | None = None
    """Why the packages are not known."""

    reaches: dict[str, bool] = field(default_factory=dict)
    """Other host -> whether its SSH port answers from here."""


def check_hosts(inventory: Inventory) -> list[HostReport]:
    """One report a host, in inventory order."""
    addresses = {entry.name: endpoint_of(entry) for entry in inventory.hosts if entry.via == SSH}
    return [
        _check(entry, {name: (e.hostname, e.port) for name, e in addresses.items() if name != entry.name})
        for entry in inventory.hosts
    ]


def _check(entry: HostEntry, others: dict[str, tuple[str, int]]) -> HostReport:
    report = HostReport(name=entry.name, via=entry.via)
    connection = Connection(endpoint_of(entry)) if entry.via == SSH else None
    shell: Shell = SshShell(connection) if connection is not None else LocalShell(entry.name)
    try:
        _read_facts(report, shell, entry)
        if isinstance(shell, SshShell):
            # A plain listing shows that SFTP works, which stages and transfers need.
            shell.read_from(PurePosixPath(entry.work_dir) / "manifest.json", 0, limit=1)
            _read_packages(report, shell, entry)
            report.reaches = {name: _reaches(shell, *address) for name, address in others.items()}
    except EvalError as exc:
        report.problem = exc
    finally:
        if connection is not None:
            connection.close()
    return report


def _read_facts(report: HostReport, shell: Shell, entry: HostEntry) -> None:
    before = time.time()
    done = shell.run(_FACTS.format(work_dir=shlex.quote(str(entry.work_dir))), timeout_s=SCRIPT_TIMEOUT_S)
    middle = (before + time.time()) / 2
    if done.exit_code != 0:
        raise HostError(
            f"[{entry.name}] cannot run a script: {done.stderr.decode(errors='replace').strip()[-200:]}.",
            "Log in by hand and look.",
        )
    for line in done.stdout.decode(errors="replace").splitlines():
        word, _, value = line.partition(" ")
        if word == "time":
            report.clock_skew_s = float(value) - middle
        elif word in ("cores", "load"):
            setattr(report, word, value)
        elif word == "memory" and value != "?":
            report.memory_bytes = float(value)
        elif word == "disk" and value:
            report.disk_bytes = float(value)
        elif word == "writable":
            report.writable = value == "yes"
        elif word == "gpu":
            report.gpus.append(value)
        elif word == "lock":
            name, _, content = value.partition(" ")
            report.locks.append(lock_sentence(name, content))


def _read_packages(report: HostReport, shell: Shell, entry: HostEntry) -> None:
    if entry.roles == ("train",):
        return
    try:
        report.packages = probe_packages(shell, python=entry.python or REMOTE_PYTHON)
    except HostError as exc:
        report.packages_problem = exc.problem


def _reaches(shell: Shell, hostname: str, port: int) -> bool:
    """Whether a TCP connection opens from that host, by whichever of bash, nc or python3 it has."""
    target, number = shlex.quote(hostname), int(port)
    script = (
        f"if command -v bash >/dev/null; then timeout {REACH_TIMEOUT_S} bash -c 'exec 3<>/dev/tcp/'{target}'/{number}' 2>/dev/null;\n"
        f"elif command -v nc >/dev/null; then nc -z -w {REACH_TIMEOUT_S} {target} {number};\nelse exit 1; fi"
    )
    return shell.run(script, timeout_s=SCRIPT_TIMEOUT_S).exit_code == 0


def shortcomings(report: HostReport, roles: Sequence[str]) -> list[str]:
    """What speaks against using this host for its roles, as short phrases; () where nothing does."""
    if report.problem is not None:
        return [report.problem.problem]
    found = []
    if report.writable is False and list(roles) != ["train"] and report.name != RELAY:
        found.append("its work directory cannot be written")
    if report.packages_problem is not None:
        found.append(report.packages_problem)
    elif report.packages is not None and not report.packages.usable:
        found.append(f"wrong packages ({report.packages})")
    if report.clock_skew_s is not None and abs(report.clock_skew_s) > 60:
        found.append(f"its clock is off by {report.clock_skew_s:+.0f} s")
    return found
