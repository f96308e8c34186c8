"""The inventory: which hosts there are, what each may do, where its files lie. A YAML file, reviewed in git.

    hosts:
      gpu-a: {via: local, work_dir: /data/gpu-a, roles: [target], threads: 8, slots: 1, gpus: [0, 1], min_gpu_memory_gib: 20}
      train: {via: ssh, hostname: train.example.org, user: me, work_dir: /scratch/me/dflash, roles: [train]}
Order is preference. The host `relay`, the machine that runs the flow, is always there.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_model.errors import InputError, from_os_error

RELAY = "relay"
ROLES = ("train", "target", "eval")
LOCAL, SSH = "local", "ssh"
SILENCE_S, GRACE_S, LEASE_S = 45.0, 240.0, 300.0
_KEYS = {"via", "work_dir", "roles", "threads", "slots", "python", "gpus", "min_gpu_memory_gib"}
_SSH_KEYS = {
    "hostname", "port", "user", "key", "known_hosts", "jump", "silence_s", "grace_s", "lease_s", "connections", "max_mb_per_s",
}  # fmt: skip
MAX_CONNECTIONS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SshAccess:
    """How a host with `via: ssh` is reached; what is None comes from ~/.ssh/config. The arguments of `resolve_endpoint`."""

    hostname: str | None = None
    """What one would give to `ssh`: a name, an address or an alias; None: the entry's own name."""

    port: int | None = None
    """TCP port."""

    user: str | None = None
    """Login there."""

    key: Path | None = None
    """The only key to offer."""

    known_hosts: tuple[Path, ...] = ()
    """Files with host keys."""

    jump: str | None = None
    """Hosts to pass through, as ProxyJump: user@host:port, several with commas."""

    silence_s: float = SILENCE_S
    """After so long without a sign of life the link counts as cut."""

    grace_s: float = GRACE_S
    """A running stage waits so long for a cut link to come back before its host counts as down; less than `lease_s`."""

    lease_s: float = LEASE_S
    """A stage that has not heard of its runner for so long ends itself."""

    connections: int = 1
    """How many connections one large checkpoint may use at once; more than one helps where round trips are long."""

    max_mb_per_s: float | None = None
    """Files move to and from it no faster than this (MB = 10^6 bytes); None: as fast as they can."""

    def __post_init__(self) -> None:
        """ValueError where a stage would give up its lease before its runner gives up the link."""
        if not 0 < self.grace_s < self.lease_s or self.silence_s <= 0:
            raise ValueError(f"silence_s {self.silence_s:g}, grace_s {self.grace_s:g}, lease_s {self.lease_s:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEntry:
    """One host of the inventory."""

    name: str
    """How flows and messages call it."""

    via: str
    """How it is reached: LOCAL (a directory of this machine) or SSH."""

    work_dir: Path
    """Where its artifacts lie; made when missing. With `via: ssh` a path of that host."""

    roles: tuple[str, ...]
    """Any of ROLES: train (checkpoints, only read), target (references, hidden states), eval (replay)."""

    threads: int
    """CPU threads of one stage program."""

    slots: int
    """Stage programs at a time."""

    python: str | None
    """Interpreter for stage programs, `~/` in front is the home directory there; None: the one that runs the flow, with `via: ssh` the host's python3."""

    ssh: SshAccess | None = None
    """Given for `via: ssh` alone."""

    gpus: tuple[int, ...] = ()
    """GPUs by number, in order of preference, one of which a stage that runs the target takes for itself; (): no locks."""

    min_gpu_memory_gib: float | None = None
    """A GPU with less free memory than this is passed over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All hosts, in order of preference, `relay` last."""

    hosts: tuple[HostEntry, ...]
    """Unique names."""

    def entry(self, name: str) -> HostEntry:
        """The host called `name`. Raises InputError naming those that exist."""
        for host in self.hosts:
            if host.name == name:
                return host
        known = ", ".join(host.name for host in self.hosts)
        raise InputError(f"There is no host {name!r} in the inventory.", f"Use one of: {known}.")

    def with_role(self, role: str) -> tuple[HostEntry, ...]:
        """Hosts that have `role`, in order. Raises InputError where none has it."""
        found = tuple(host for host in self.hosts if role in host.roles)
        if not found:
            raise InputError(f"No host of the inventory has the role {role!r}.", f"Add `roles: [{role}]` to a host.")
        return found


def single_machine(home: Path) -> Inventory:
    """The inventory of a run without a hosts file: one work tree below `home` plays every part."""
    here = HostEntry(name="here", via="local", work_dir=home / "here", roles=ROLES, threads=_cores(), slots=1, python=None)
    return Inventory(hosts=(here, _relay(home)))


def read_inventory(path: Path, *, home: Path) -> Inventory:
    """Read a hosts file. Relative work directories start at the file's directory. Raises InputError naming the key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise from_os_error(exc, f"reading the inventory {path}") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{path} is not YAML: {exc}.", "Correct that line.") from exc
    hosts = data.get("hosts") if isinstance(data, dict) else None
    if not isinstance(hosts, dict) or not hosts:
        raise InputError(f"{path} has no `hosts:` mapping.", "Write `hosts:` and one entry a host below it.")
    entries = tuple(_entry(path, str(name), fields) for name, fields in hosts.items())
    return Inventory(hosts=(*entries, _relay(home)))


def _entry(path: Path, name: str, fields: Any) -> HostEntry:
    where = f"{path}, host {name}"
    if name == RELAY:
        raise InputError(f"{where}: the name {RELAY} stands for the machine that runs the flow.", "Choose another name.")
    if not isinstance(fields, dict):
        raise InputError(f"{where}: expected a mapping, got {fields!r}.", "Write `work_dir:` and `roles:` below it.")
    via = fields.get("via", LOCAL)
    if via not in (LOCAL, SSH):
        raise InputError(f"{where}: via {via!r} is not known.", "Use `via: local` or `via: ssh`.")
    _refuse_unknown_keys(where, fields, _KEYS if via == LOCAL else _KEYS | _SSH_KEYS)
    roles = fields.get("roles", list(ROLES))
    if not isinstance(roles, list) or not roles or any(role not in ROLES for role in roles):
        raise InputError(f"{where}: roles {roles!r}.", f"Give a list out of: {', '.join(ROLES)}.")
    if not isinstance(fields.get("work_dir"), str):
        raise InputError(f"{where}: `work_dir` is missing.", "Give the directory where its artifacts shall lie.")
    return HostEntry(
        name=name,
        via=via,
        work_dir=_work_dir(path, where, fields["work_dir"], via),
        roles=tuple(roles),
        threads=_threads(where, fields, roles, via),
        slots=_count(where, fields, "slots", 1),
        python=_python(where, fields, via),
        ssh=_ssh_access(path, where, fields) if via == SSH else None,
        gpus=_gpus(where, fields, roles),
        min_gpu_memory_gib=_min_gpu_memory(where, fields),
    )


def _refuse_unknown_keys(where: str, fields: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(fields) - known)
    if unknown and unknown[0] in _SSH_KEYS:
        raise InputError(f"{where}: `{unknown[0]}` is for hosts that SSH reaches.", "Add `via: ssh`, or remove it.")
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}.", f"Known keys: {', '.join(sorted(known))}.")


def _work_dir(path: Path, where: str, text: str, via: str) -> Path:
    if via == LOCAL:
        return (path.parent / Path(text).expanduser()).resolve()
    if not text.startswith("/"):
        raise InputError(f"{where}: `work_dir` {text!r} is not absolute.", "Give the whole path as that host has it, without ~.")
    return Path(text)


def _threads(where: str, fields: dict[str, Any], roles: list[str], via: str) -> int:
    """Cores of this machine say nothing about another one, so a host that runs stages must tell."""
    if via == SSH and "threads" not in fields and roles != ["train"]:
        raise InputError(f"{where}: `threads` is missing.", "Give the number of CPU threads that one stage may use there.")
    return _count(where, fields, "threads", _cores() if via == LOCAL else 1)


def _gpus(where: str, fields: dict[str, Any], roles: list[str]) -> tuple[int, ...]:
    if "gpus" not in fields:
        return ()
    numbers = fields["gpus"]
    whole = isinstance(numbers, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers)
    if not whole or not numbers or len(set(numbers)) != len(numbers):
        raise InputError(
            f"{where}: `gpus` is {numbers!r}.", "Give a list of distinct whole numbers, as nvidia-smi counts: [0, 1]."
        )
    if "target" not in roles:
        raise InputError(f"{where}: `gpus` is for hosts with the role target.", "Add target to its roles, or remove `gpus`.")
    return tuple(numbers)


def _min_gpu_memory(where: str, fields: dict[str, Any]) -> float | None:
    if "min_gpu_memory_gib" not in fields:
        return None
    value = fields["min_gpu_memory_gib"]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{where}: `min_gpu_memory_gib` is {value!r}.", "Give a number of GiB above 0.")
    if "gpus" not in fields:
        raise InputError(f"{where}: `min_gpu_memory_gib` without `gpus`.", "Name the GPUs, as in `gpus: [0]`, or remove it.")
    return float(value)


def _ssh_access(path: Path, where: str, fields: dict[str, Any]) -> SshAccess:
    port = _count(where, fields, "port", 22) if "port" in fields else None
    if port is not None and port > 65535:
        raise InputError(f"{where}: `port` is {port}.", "Give a number from 1 to 65535.")
    known_hosts = fields.get("known_hosts", [])
    files = [known_hosts] if isinstance(known_hosts, str) else known_hosts
    if not isinstance(files, list) or not all(isinstance(file, str) and file for file in files):
        raise InputError(f"{where}: `known_hosts` is {known_hosts!r}.", "Give a file, or a list of files.")
    key = _text(where, fields, "key")
    seconds = {name: _seconds(where, fields, name) for name in ("silence_s", "grace_s", "lease_s") if name in fields}
    if seconds.get("grace_s", GRACE_S) >= seconds.get("lease_s", LEASE_S):
        raise InputError(
            f"{where}: `grace_s` must be less than `lease_s`.",
            "Else a stage gives itself up while its runner still waits for it.",
        )
    return SshAccess(
        hostname=_text(where, fields, "hostname"),
        port=port,
        user=_text(where, fields, "user"),
        key=None if key is None else path.parent / Path(key).expanduser(),
        known_hosts=tuple(path.parent / Path(file).expanduser() for file in files),
        jump=_text(where, fields, "jump"),
        connections=_connections(where, fields),
        max_mb_per_s=_seconds(where, fields, "max_mb_per_s", unit="MB a second") if "max_mb_per_s" in fields else None,
        **seconds,
    )


def _connections(where: str, fields: dict[str, Any]) -> int:
    count = _count(where, fields, "connections", 1)
    if count > MAX_CONNECTIONS:
        raise InputError(f"{where}: `connections` is {count}.", f"Give a number from 1 to {MAX_CONNECTIONS}.")
    return count


def _seconds(where: str, fields: dict[str, Any], key: str, *, unit: str = "seconds") -> float:
    value = fields[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise InputError(f"{where}: `{key}` is {value!r}.", f"Give a number of {unit} above 0.")
    return float(value)


def _text(where: str, fields: dict[str, Any], key: str) -> str | None:
    value = fields.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise InputError(f"{where}: `{key}` is {value!r}.", "Give a word in quotes, or leave it out.")
    return value


def _python(where: str, fields: dict[str, Any], via: str) -> str | None:
    """An absolute path, or a program's name; `~` of another host is that host's to expand."""
    text = _text(where, fields, "python")
    if text is None or not text.startswith("~"):
        return text
    if via == LOCAL:
        return str(Path(text).expanduser())
    if not text.startswith("~/"):
        raise InputError(f"{where}: `python` {text!r} names another user's home.", "Give the whole path as that host has it.")
    return text


def _count(where: str, fields: dict[str, Any], key: str, default: int) -> int:
    value = fields.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: `{key}` is {value!r}.", "Give a whole number of at least 1.")
    return value


def _relay(home: Path) -> HostEntry:
    return HostEntry(name=RELAY, via="local", work_dir=home / RELAY, roles=(), threads=_cores(), slots=2, python=None)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
