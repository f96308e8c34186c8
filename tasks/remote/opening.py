"""From an inventory entry to a host that can be used. Nothing is connected before the first question."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from dflash_model.storage import sweep
from tasks.remote.code import pack_code
from tasks.remote.connection import Connection
from tasks.remote.endpoint import Endpoint, Timeouts, resolve_endpoint
from tasks.remote.gpu_lock import GpuLocks, lock_lifetime_s
from tasks.remote.host import Host
from tasks.remote.host_sweep import sweep_host
from tasks.remote.inventory import LEASE_S, SSH, HostEntry, SshAccess
from tasks.remote.local import LocalHost
from tasks.remote.local_shell import LocalShell
from tasks.remote.remote_runner import RemoteRunner
from tasks.remote.shell import Shell
from tasks.remote.ssh_host import SshHost
from tasks.remote.ssh_shell import SshShell
from tasks.remote.throttle import Throttle

REMOTE_PYTHON = "python3"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenHost:
    """What is behind an inventory entry."""

    host: Host
    """Files and stage programs."""

    gpus: GpuLocks | None
    """Its GPUs; None where the entry names none."""

    sweep: Callable[[], None] = lambda: None
    """Remove what killed writers left there, if it is connected. A host with the role train alone is never written to."""


def open_host(entry: HostEntry) -> OpenHost:
    """The host behind an entry. Raises InputError for settings that cannot be resolved."""
    if entry.via == SSH:
        return _over_ssh(entry)
    sweep(entry.work_dir)
    python = entry.python or sys.executable
    host = LocalHost(entry.name, entry.work_dir, threads=entry.threads, slots=entry.slots, python=python)
    return OpenHost(host=host, gpus=_gpus(entry, LocalShell(entry.name), python=python, lease_s=LEASE_S))


def _gpus(entry: HostEntry, shell: Shell, *, python: str, lease_s: float) -> GpuLocks | None:
    if not entry.gpus:
        return None
    return GpuLocks(
        shell,
        work_dir=PurePosixPath(entry.work_dir),
        python=python,
        gpus=entry.gpus,
        min_free_gib=entry.min_gpu_memory_gib,
        lifetime_s=lock_lifetime_s(lease_s),
    )


def endpoint_of(entry: HostEntry) -> Endpoint:
    """How a host with `via: ssh` is reached. Raises InputError."""
    access = entry.ssh or SshAccess()
    return resolve_endpoint(
        entry.name,
        hostname=access.hostname,
        port=access.port,
        user=access.user,
        key=access.key,
        known_hosts=access.known_hosts or default_known_hosts(),
        jump=access.jump,
        timeouts=_timeouts(access.silence_s),
    )


def _timeouts(silence_s: float) -> Timeouts:
    """A third of the silence passes before we ask, the rest before no answer counts as a cut link."""
    usual = Timeouts()
    return replace(
        usual,
        keepalive=silence_s / 3,
        io=2 * silence_s / 3,
        connect=min(usual.connect, silence_s),
        channel=min(usual.channel, silence_s),
    )


def default_known_hosts() -> tuple[Path, ...]:
    """Where host keys are looked for when an entry names no file; `hosts trust` adds to the first."""
    return (Path.home() / ".ssh" / "known_hosts",)


def _over_ssh(entry: HostEntry) -> OpenHost:
    access = entry.ssh or SshAccess()
    connection = Connection(endpoint_of(entry))
    shell, python = SshShell(connection), entry.python or REMOTE_PYTHON
    work_dir = PurePosixPath(entry.work_dir)
    runner = RemoteRunner(
        shell,
        work_dir=work_dir,
        python=python,
        code=pack_code(),
        threads=entry.threads,
        slots=entry.slots,
        lease_s=access.lease_s,
        grace_s=access.grace_s,
        poll_s=min(1.0, access.silence_s / 5),
    )
    gpus = _gpus(entry, shell, python=python, lease_s=access.lease_s)
    host = SshHost(
        connection,
        work_dir,
        runner=runner,
        connections=access.connections,
        grace_s=access.grace_s,
        throttle=Throttle(access.max_mb_per_s * 1e6 if access.max_mb_per_s is not None else None),
    )

    def sweep_if_connected() -> None:
        if connection.is_alive and entry.roles != ("train",):
            sweep_host(shell, work_dir=work_dir, python=python)

    return OpenHost(host=host, gpus=gpus, sweep=sweep_if_connected)
