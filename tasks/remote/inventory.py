"""The inventory: which hosts there are, what each may do, where its files lie. A YAML file, reviewed in git.

    hosts:
      gpu-a: {via: local, work_dir: /data/gpu-a, roles: [target], threads: 8, slots: 1}
Order is preference. The host `relay`, the machine that runs the flow, is always there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dflash_model.errors import InputError, from_os_error

RELAY = "relay"
ROLES = ("train", "target", "eval")
_KEYS = {"via", "work_dir", "roles", "threads", "slots", "python"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HostEntry:
    """One host of the inventory."""

    name: str
    """How flows and messages call it."""

    via: str
    """How it is reached: "local" (a directory of this machine)."""

    work_dir: Path
    """Where its artifacts lie; made when missing."""

    roles: tuple[str, ...]
    """Any of ROLES: train (checkpoints, only read), target (references, hidden states), eval (replay)."""

    threads: int
    """CPU threads of one stage program."""

    slots: int
    """Stage programs at a time."""

    python: str | None
    """Interpreter for stage programs; None: the one that runs the flow."""


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
    unknown = sorted(set(fields) - _KEYS)
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}.", f"Known keys: {', '.join(sorted(_KEYS))}.")
    if fields.get("via", "local") != "local":
        raise InputError(f"{where}: via {fields['via']!r} is not known.", "Use `via: local`.")
    roles = fields.get("roles", list(ROLES))
    if not isinstance(roles, list) or not roles or any(role not in ROLES for role in roles):
        raise InputError(f"{where}: roles {roles!r}.", f"Give a list out of: {', '.join(ROLES)}.")
    if not isinstance(fields.get("work_dir"), str):
        raise InputError(f"{where}: `work_dir` is missing.", "Give the directory where its artifacts shall lie.")
    return HostEntry(
        name=name,
        via="local",
        work_dir=(path.parent / Path(fields["work_dir"]).expanduser()).resolve(),
        roles=tuple(roles),
        threads=_count(where, fields, "threads", _cores()),
        slots=_count(where, fields, "slots", 1),
        python=fields.get("python"),
    )


def _count(where: str, fields: dict[str, Any], key: str, default: int) -> int:
    value = fields.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: `{key}` is {value!r}.", "Give a whole number of at least 1.")
    return value


def _relay(home: Path) -> HostEntry:
    return HostEntry(name=RELAY, via="local", work_dir=home / RELAY, roles=(), threads=_cores(), slots=2, python=None)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
