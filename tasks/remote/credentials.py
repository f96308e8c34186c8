"""Logging in with a key: the named one alone, or the agent's keys and then the key files. No passwords, no prompts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import paramiko

from dflash_model.errors import EvalError, HostError, InputError
from tasks.remote.endpoint import Endpoint
from tasks.remote.ssh_errors import FOREIGN, UNREADABLE, translate

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tried:
    """What was offered and what could not be."""

    refused: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def log_in(transport: paramiko.Transport, endpoint: Endpoint) -> None:
    """Authenticate a negotiated transport. Raises HostError or InputError, each naming the keys and the way out."""
    transport.auth_timeout = endpoint.timeouts.auth
    if endpoint.key is not None:
        tried = _Tried()
        if not _offer(transport, endpoint, _named_key(endpoint, endpoint.key), label=str(endpoint.key), tried=tried):
            raise _refused(endpoint, tried)
        return
    tried = _Tried()
    agent = _agent(tried) if endpoint.use_agent else None
    try:
        for label, key in _keys(endpoint, agent, tried):
            if _offer(transport, endpoint, key, label=label, tried=tried):
                return
    finally:
        if agent is not None:
            agent.close()
    raise _refused(endpoint, tried)


def _named_key(endpoint: Endpoint, path: Path) -> paramiko.PKey:
    try:
        return paramiko.PKey.from_path(path.expanduser())
    except FileNotFoundError as exc:
        raise InputError(
            f"[{endpoint.name}] there is no key {path}.", "Correct `key:`, or leave it out to use the agent."
        ) from exc
    except TypeError as exc:  # how cryptography says "encrypted"
        raise HostError(
            f"[{endpoint.name}] the key {path} is encrypted, and no passphrase is asked for here.",
            f"Run `ssh-add {path}` and leave `key:` out, or name a key without a passphrase.",
        ) from exc
    except UNREADABLE as exc:
        raise InputError(
            f"[{endpoint.name}] {path} is no private key that can be used: {exc}.", "Name an OpenSSH or PEM private key file."
        ) from exc


def _agent(tried: _Tried) -> paramiko.Agent | None:
    try:
        return paramiko.Agent()
    except FOREIGN as exc:
        tried.skipped.append(f"the agent does not answer ({exc})")
        return None


def _keys(endpoint: Endpoint, agent: paramiko.Agent | None, tried: _Tried) -> Iterator[tuple[str, paramiko.PKey]]:
    """(how to call it, key): the agent's, then the files' that the agent does not hold."""
    offered: set[bytes] = set()
    for key in agent.get_keys() if agent is not None else ():
        offered.add(key.asbytes())
        yield f"agent key {key.comment or key.get_name()}", key
    for path in endpoint.identities:
        try:
            file_key = paramiko.PKey.from_path(path)
        except FileNotFoundError:
            continue
        except TypeError:
            tried.skipped.append(f"{path} is encrypted")
            continue
        except UNREADABLE as exc:
            tried.skipped.append(f"{path} cannot be read ({exc})")
            continue
        if file_key.asbytes() not in offered:
            yield str(path), file_key


def _offer(transport: paramiko.Transport, endpoint: Endpoint, key: paramiko.PKey, *, label: str, tried: _Tried) -> bool:
    """True when `key` opened the door, False when it was refused. Raises HostError where no further key can."""
    doing = f"logging in as {endpoint.address}"
    try:
        missing = transport.auth_publickey(endpoint.user, key)
    except paramiko.BadAuthenticationType as exc:
        raise HostError(
            f"[{endpoint.name}] {endpoint.address} takes no keys, only: {', '.join(exc.allowed_types)}.",
            "Let its sshd accept publickey logins for this user.",
        ) from exc
    except paramiko.AuthenticationException as exc:
        tried.refused.append(f"{label} ({key.fingerprint})")
        if transport.is_active() and "timeout" not in str(exc).lower():
            log.debug("[%s] %s refused %s", endpoint.name, endpoint.address, label)
            return False
        raise _ended(endpoint, tried, exc, doing) from exc
    except FOREIGN as exc:
        tried.refused.append(f"{label} ({key.fingerprint})")
        if isinstance(exc, paramiko.SSHException) and transport.is_active():
            return False  # an agent that declines to sign with this key
        raise _ended(endpoint, tried, exc, doing) from exc
    if missing:
        raise HostError(
            f"[{endpoint.name}] {endpoint.address} wants more than a key: {', '.join(missing)}.",
            "Let its sshd accept a key alone for this user; nobody is there to type a second factor.",
        )
    return True


def _ended(endpoint: Endpoint, tried: _Tried, exc: BaseException, doing: str) -> EvalError:
    """The connection ended, or fell silent, while keys were being offered."""
    if len(tried.refused) > 1:
        return HostError(
            f"[{endpoint.name}] {endpoint.address} ended the connection after {len(tried.refused)} keys.",
            "Name the right one with `key:`; sshd allows few tries (MaxAuthTries).",
        )
    return translate(exc, host=endpoint.name, doing=doing)


def _refused(endpoint: Endpoint, tried: _Tried) -> EvalError:
    aside = f" Not offered: {'; '.join(tried.skipped)}." if tried.skipped else ""
    if tried.refused:
        return HostError(
            f"[{endpoint.name}] {endpoint.address} refused {', '.join(tried.refused)}.{aside}",
            f"Add the public half of the right key to ~/.ssh/authorized_keys of {endpoint.user} there (ssh-copy-id), or name it with `key:`.",
        )
    if tried.skipped:
        return HostError(
            f"[{endpoint.name}] there is no key to offer to {endpoint.address}: {'; '.join(tried.skipped)}.",
            "Load the key into an agent (ssh-add), or name one without a passphrase with `key:`.",
        )
    looked = ", ".join(map(str, endpoint.identities)) or "none"
    return HostError(
        f"[{endpoint.name}] there is no key to offer to {endpoint.address}: no agent holds one, and none of these exists: {looked}.",
        "Name one with `key:`, or make one (ssh-keygen -t ed25519) and copy it there (ssh-copy-id).",
    )
