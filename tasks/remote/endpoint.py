"""Where a host is and how to log in there: explicit values first, then what ~/.ssh/config says. Nothing is connected here.

`hostname` is what one would give to `ssh`: a name, an address, or an alias of ~/.ssh/config.
"""

from __future__ import annotations

import getpass
import re
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import paramiko

from dflash_model.errors import InputError
from tasks.remote.ssh_config import read_ssh_config
from tasks.remote.ssh_errors import translated

SSH_PORT = 22
MAX_JUMPS = 8
DEFAULT_IDENTITIES = ("id_ed25519", "id_ecdsa", "id_rsa")
SYSTEM_KNOWN_HOSTS = (Path("/etc/ssh/ssh_known_hosts"), Path("/etc/ssh/ssh_known_hosts2"))
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d+))?/?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long each step of a connection may take, in seconds."""

    connect: float = 10.0
    """TCP connection to one address."""

    banner: float = 15.0
    """First line of sshd, and again the key exchange."""

    auth: float = 20.0
    """Answer to one key."""

    channel: float = 15.0
    """Opening a channel."""

    io: float = 30.0
    """Sent bytes that nobody acknowledges (TCP_USER_TIMEOUT), or a keepalive that nobody answers: the link is cut."""

    keepalive: float = 15.0
    """Silence after which a keepalive is sent."""

    stall: float = 120.0
    """A transfer on a living link that moves no byte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """One host over SSH, everything decided."""

    name: str
    """The host's name in the inventory, for messages."""

    hostname: str
    """Name or address to connect to."""

    port: int
    """TCP port."""

    user: str
    """Login there."""

    key: Path | None
    """The only key to offer; None: agent, then `identities`."""

    known_hosts: tuple[Path, ...]
    """Files of known host keys; the first is the one to add to."""

    identities: tuple[Path, ...] = ()
    """Keys to offer after the agent's; missing files are skipped."""

    use_agent: bool = True
    """False where ~/.ssh/config says IdentitiesOnly."""

    host_key_alias: str | None = None
    """Name in known_hosts instead of the host's own."""

    jumps: tuple[Endpoint, ...] = ()
    """Hosts to pass through, nearest first; none of them has jumps of its own."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    """Time limits."""

    @property
    def address(self) -> str:
        """user@hostname, with the port where it is not 22."""
        shown = f"[{self.hostname}]" if ":" in self.hostname else self.hostname
        return f"{self.user}@{shown}" + (f":{self.port}" if self.port != SSH_PORT else "")

    @property
    def known_as(self) -> str:
        """How known_hosts calls it: the alias, the name, or [name]:port."""
        if self.host_key_alias is not None:
            return self.host_key_alias
        return self.hostname if self.port == SSH_PORT else f"[{self.hostname}]:{self.port}"


def resolve_endpoint(
    name: str,
    *,
    hostname: str | None = None,
    port: int | None = None,
    user: str | None = None,
    key: Path | None = None,
    known_hosts: tuple[Path, ...] = (),
    jump: str | None = None,
    timeouts: Timeouts | None = None,
    config_path: Path | None = None,
) -> Endpoint:
    """The endpoint of host `name`; what is not given comes from ~/.ssh/config, then from OpenSSH's defaults.

    `jump` is one ProxyJump value ("user@host:port,next"; "none": straight). A jump host takes `key` and `known_hosts` too,
    unless ~/.ssh/config names an identity for it. Raises InputError.
    """
    path = config_path if config_path is not None else Path.home() / ".ssh" / "config"
    explicit = Endpoint(
        name=name, hostname=hostname or name, port=port or 0, user=user or "", key=key, known_hosts=known_hosts,
        timeouts=timeouts or Timeouts(),
    )  # fmt: skip
    return _Resolver(read_ssh_config(path), path, explicit).endpoint(explicit, jump=jump, depth=0)


class _Resolver:
    """Completes one endpoint and its jump hosts from a configuration."""

    def __init__(self, config: paramiko.SSHConfig, path: Path, explicit: Endpoint) -> None:
        self._config = config
        self._path = path
        self._explicit = explicit

    def endpoint(self, given: Endpoint, *, jump: str | None, depth: int, key_is_own: bool = True) -> Endpoint:
        """`given` with its gaps filled. `key_is_own`: its key was named for this very host."""
        where = f"[{given.name}] {given.hostname} in {self._path}"
        options = self._options(given)
        jumps = self._jumps(jump if jump is not None else options.get("proxyjump"), where, depth)
        if not jumps and jump is None and options.get("proxycommand") is not None:
            raise InputError(
                f"{where} is reached by a ProxyCommand, which is not supported.", "Use ProxyJump there, or give `jump:`."
            )
        identities = cast("list[str] | None", options.get("identityfile"))  # the one key that may come several times
        own_key = given.key if key_is_own or not identities else None
        return replace(
            given,
            hostname=options.get("hostname", given.hostname),
            port=given.port or _port(options.get("port", str(SSH_PORT)), where),
            user=given.user or options.get("user") or getpass.getuser(),
            key=own_key,
            known_hosts=given.known_hosts or self._known_hosts(options.get("userknownhostsfile")),
            identities=_identities(identities),
            use_agent=options.get("identitiesonly", "no").lower() != "yes",
            host_key_alias=options.get("hostkeyalias"),
            jumps=jumps,
        )

    def _options(self, given: Endpoint) -> paramiko.SSHConfigDict:
        with translated(given.name, f"looking up {given.hostname} in {self._path}"):
            return self._config.lookup(given.hostname)

    def _jumps(self, spec: str | None, where: str, depth: int) -> tuple[Endpoint, ...]:
        """The chain of a ProxyJump value. Only its first host may be behind jump hosts of its own, as with ssh."""
        if spec is None or spec.strip().lower() in ("", "none"):
            return ()
        if depth >= MAX_JUMPS:
            raise InputError(f"{where}: more than {MAX_JUMPS} jump hosts.", "Remove the ProxyJump that leads back to itself.")
        chain: list[Endpoint] = []
        for position, text in enumerate(spec.split(",")):
            hop = self._hop(text.strip(), where)
            own = None if position == 0 else "none"
            resolved = self.endpoint(hop, jump=own, depth=depth + 1, key_is_own=False)
            chain += [*resolved.jumps, replace(resolved, jumps=())]
        if len(chain) > MAX_JUMPS:
            raise InputError(f"{where}: more than {MAX_JUMPS} jump hosts.", "Use a shorter chain.")
        return tuple(chain)

    def _hop(self, text: str, where: str) -> Endpoint:
        match = _JUMP.fullmatch(text)
        if match is None:
            raise InputError(f"{where}: the jump host {text!r} cannot be read.", "Write user@host:port, several with commas.")
        explicit = self._explicit
        return Endpoint(
            name=explicit.name,
            hostname=match["v6"] or match["host"],
            port=_port(match["port"], where) if match["port"] else 0,
            user=match["user"] or "",
            key=explicit.key,
            known_hosts=explicit.known_hosts,
            timeouts=explicit.timeouts,
        )

    def _known_hosts(self, option: str | None) -> tuple[Path, ...]:
        own = shlex.split(option) if option else ["~/.ssh/known_hosts", "~/.ssh/known_hosts2"]
        return (*(Path(text).expanduser() for text in own if text.lower() != "none"), *SYSTEM_KNOWN_HOSTS)


def _identities(option: list[str] | None) -> tuple[Path, ...]:
    if not option:
        return tuple(Path.home() / ".ssh" / name for name in DEFAULT_IDENTITIES)
    return tuple(Path(text).expanduser() for text in option if text.lower() != "none")


def _port(text: str, where: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise InputError(f"{where}: the port {text!r} is none.", "Give a number from 1 to 65535.")
    return int(text)
