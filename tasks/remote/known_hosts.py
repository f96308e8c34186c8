"""Which host keys are known: files in OpenSSH's known_hosts format, read whole and never written to but by `add_known_host`.

Unlike paramiko's HostKeys it knows wildcards, negation, @revoked and several keys of one type for one host.
"""

from __future__ import annotations

import base64
import binascii
import enum
import fnmatch
import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import paramiko

from dflash_model.errors import EvalError, HostError
from tasks.remote.endpoint import Endpoint
from tasks.remote.ssh_errors import translated

RSA = "ssh-rsa"
RSA_ALGORITHMS = ("rsa-sha2-512", "rsa-sha2-256")
"""How an ssh-rsa key may sign; SHA-1 signatures are not accepted."""


class Verdict(enum.Enum):
    """What the files say about an offered key."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownKey:
    """One line of a known_hosts file."""

    names: tuple[str, ...]
    """Patterns, or one hashed name."""

    key_type: str
    """ssh-ed25519, ..."""

    blob: bytes
    """The public key as it goes over the wire."""

    revoked: bool
    """Marked @revoked: must never be accepted."""

    where: str
    """file:line"""

    def matches(self, name: str) -> bool:
        """True where this line speaks of `name`."""
        if any(pattern.startswith("!") and _matches(name, pattern[1:]) for pattern in self.names):
            return False
        return any(_matches(name, pattern) for pattern in self.names)


class KnownHosts:
    """The lines of several files."""

    def __init__(self, keys: Iterable[KnownKey]) -> None:
        self._keys = tuple(keys)

    @classmethod
    def read(cls, paths: Iterable[Path], *, host: str) -> KnownHosts:
        """All lines that can be read; missing files are empty. Raises EvalError where a file is there and cannot be read."""
        keys: list[KnownKey] = []
        for path in paths:
            if path.is_file():
                with translated(host, f"reading {path}"):
                    text = path.read_text(encoding="utf-8", errors="replace")
                lines = enumerate(text.splitlines(), 1)
                keys += [key for number, line in lines if (key := _parse(line, f"{path}:{number}")) is not None]
        return cls(keys)

    def of(self, endpoint: Endpoint) -> tuple[KnownKey, ...]:
        """Lines about this endpoint, revoked ones too."""
        return tuple(key for key in self._keys if key.matches(endpoint.known_as))

    def verdict(self, endpoint: Endpoint, key: paramiko.PKey) -> Verdict:
        """Whether `key` is the one of `endpoint`."""
        blob = key.asbytes()
        if any(known.revoked and known.blob == blob for known in self._keys):
            return Verdict.REVOKED
        lines = [known for known in self.of(endpoint) if not known.revoked]
        # As ssh does: a key that is known for the name without a port is good for every port of that name.
        without_port = [known for known in self._keys if known.matches(endpoint.hostname) and not known.revoked]
        if any(known.blob == blob for known in (*lines, *without_port)):
            return Verdict.KNOWN
        return Verdict.CHANGED if lines else Verdict.UNKNOWN

    def preferred(self, endpoint: Endpoint, offered: Iterable[str]) -> tuple[str, ...]:
        """`offered` algorithms, those of known keys first: else sshd presents another key of its, which looks unknown."""
        types = {key.key_type for key in self.of(endpoint)} or {k.key_type for k in self._keys if k.matches(endpoint.hostname)}
        known = types | (set(RSA_ALGORITHMS) if RSA in types else set())
        algorithms = list(offered)
        return tuple(sorted(algorithms, key=lambda name: name not in known))


def refusal(verdict: Verdict, endpoint: Endpoint, key: paramiko.PKey, known: KnownHosts) -> EvalError:
    """The error for a key that must not be accepted: fingerprint, the line to add, and how to add it."""
    line, shown = known_hosts_line(endpoint, key), f"{key.get_name()} {key.fingerprint}"
    file = endpoint.known_hosts[0] if endpoint.known_hosts else Path("~/.ssh/known_hosts")
    who = f"[{endpoint.name}] the host key of {endpoint.known_as}"
    trust = f"`dflash-eval hosts trust {endpoint.name}`"
    if verdict is Verdict.UNKNOWN:
        return HostError(
            f"{who} is not known; the host offers {shown}.",
            f"Compare the fingerprint with what that host's administrator says, then run {trust}, or add this line to {file}: {line}",
        )
    places = ", ".join(f"{k.key_type} {_fingerprint(k.blob)} in {k.where}" for k in known.of(endpoint))
    if verdict is Verdict.REVOKED:
        return HostError(
            f"{who} is revoked; the host offers {shown}.", "Do not connect. Ask that host's administrator for a new key."
        )
    return HostError(
        f"{who} has changed; the host offers {shown}, known is {places}. Somebody may be listening in.",
        f"If the host was set up anew, remove the old line and run {trust}, or add this line to {file}: {line}",
    )


def known_hosts_line(endpoint: Endpoint, key: paramiko.PKey) -> str:
    """The line that makes `key` known for `endpoint`."""
    return f"{endpoint.known_as} {key.get_name()} {key.get_base64()}"


def add_known_host(path: Path, line: str) -> None:
    """Append a line to a known_hosts file, made with mode 600 where it is missing. Raises EvalError."""
    with translated("relay", f"writing {path}"):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            unfinished = end > 0 and file.read(1) != b"\n"
            file.write((b"\n" if unfinished else b"") + line.encode() + b"\n")


def _fingerprint(blob: bytes) -> str:
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("|1|"):
        return _matches_hash(name, pattern)
    # A bracket is a literal in known_hosts ("[host]:port"), not a character class.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _matches_hash(name: str, pattern: str) -> bool:
    try:
        salt, digest = (base64.b64decode(part, validate=True) for part in pattern[3:].split("|"))
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(hmac.new(salt, name.encode(), hashlib.sha1).digest(), digest)


def _parse(line: str, where: str) -> KnownKey | None:
    """One line, None where it holds no key that we can compare (comments, @cert-authority, damage)."""
    fields = line.split()
    if not fields or fields[0].startswith("#"):
        return None
    marker = fields.pop(0) if fields[0].startswith("@") else ""
    if marker not in ("", "@revoked") or len(fields) < 3:
        return None
    try:
        blob = base64.b64decode(fields[2], validate=True)
    except (ValueError, binascii.Error):
        return None
    names = tuple(name for name in fields[0].split(",") if name)
    return KnownKey(names=names, key_type=fields[1], blob=blob, revoked=marker == "@revoked", where=where)
