"""From an inventory entry to a host that can be used. Nothing is connected before the first question."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath

from dflash_model.storage import sweep
from tasks.remote.code import pack_code
from tasks.remote.connection import Connection
from tasks.remote.endpoint import Endpoint, Timeouts, resolve_endpoint
from tasks.remote.host import Host
from tasks.remote.inventory import SSH, HostEntry, SshAccess
from tasks.remote.local import LocalHost
from tasks.remote.remote_runner import RemoteRunner
from tasks.remote.ssh_host import SshHost
from tasks.remote.ssh_shell import SshShell

REMOTE_PYTHON = "python3"


def open_host(entry: HostEntry) -> Host:
    """The host behind an entry. Raises InputError for settings that cannot be resolved."""
    if entry.via == SSH:
        return _over_ssh(entry)
    sweep(entry.work_dir)
    python = {"python": entry.python} if entry.python else {}
    return LocalHost(entry.name, entry.work_dir, threads=entry.threads, slots=entry.slots, **python)


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


def _over_ssh(entry: HostEntry) -> SshHost:
    access = entry.ssh or SshAccess()
    connection = Connection(endpoint_of(entry))
    work_dir = PurePosixPath(entry.work_dir)
    runner = RemoteRunner(
        SshShell(connection),
        work_dir=work_dir,
        python=entry.python or REMOTE_PYTHON,
        code=pack_code(),
        threads=entry.threads,
        slots=entry.slots,
        lease_s=access.lease_s,
        grace_s=access.grace_s,
        poll_s=min(1.0, access.silence_s / 5),
    )
    return SshHost(connection, work_dir, runner=runner)
