"""The one place where errors of paramiko, of sockets and of SFTP become ours, each a sentence that names the host.

paramiko raises bare OSError for two very different things: a channel that is gone ("Socket is closed": the host) and an
SFTP status without a number ("Failure": the disk). They are told apart by their text, here and nowhere else.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import paramiko
from paramiko.auth_strategy import AuthFailure
from paramiko.ber import BERException
from paramiko.buffered_pipe import PipeTimeout
from paramiko.hostkeys import InvalidHostKey
from paramiko.packet import NeedRekeyException
from paramiko.pkey import UnknownKeyType
from paramiko.sftp import SFTPError
from paramiko.ssh_exception import (
    ConfigParseError,
    CouldNotCanonicalize,
    IncompatiblePeer,
    MessageOrderError,
    NoValidConnectionsError,
    PartialAuthentication,
    ProxyCommandFailure,
    UnableToAuthenticate,
)

from dflash_model.errors import EvalError, HostError, InputError, StorageError

AGAIN = "Check the network and that host, then run again; finished work is kept."
SSHD = "Check that sshd runs there and that `hostname` and `port` are right (try `ssh` by hand)."
KEYS = "Check user and key (try `ssh` by hand)."
CONFIG = "Correct that line of the SSH configuration."
KEPT = "Free disk space there and run again; finished work is kept."


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one foreign class means to a user."""

    kind: type[EvalError]
    """Our class."""

    what: str
    """What happened, as the middle of "[host] ... while doing this"."""

    fix: str
    """What to do."""


MEANINGS: dict[type[BaseException], Meaning] = {
    paramiko.SSHException: Meaning(HostError, "the SSH connection failed", AGAIN),
    paramiko.AuthenticationException: Meaning(HostError, "the login was refused", KEYS),
    paramiko.PasswordRequiredException: Meaning(HostError, "a key is encrypted", "Load it into an agent with ssh-add."),
    paramiko.BadAuthenticationType: Meaning(HostError, "the host takes no public keys", "Let its sshd allow publickey logins."),
    PartialAuthentication: Meaning(HostError, "the host wants a second factor", "Let its sshd accept a key alone for this user."),
    UnableToAuthenticate: Meaning(HostError, "no login was possible", KEYS),
    AuthFailure: Meaning(HostError, "every login was refused", KEYS),
    paramiko.ChannelException: Meaning(
        HostError, "the host opened no channel", "Raise MaxSessions of its sshd, or allow forwarding if it is a jump host."
    ),
    paramiko.BadHostKeyException: Meaning(HostError, "the host key is another one than expected", "Find out why it changed."),
    IncompatiblePeer: Meaning(HostError, "no common algorithm was found", "Update sshd there; SHA-1 and DSA are not supported."),
    MessageOrderError: Meaning(HostError, "messages came out of order, perhaps by an attack", AGAIN),
    ProxyCommandFailure: Meaning(HostError, "the ProxyCommand failed", "Use ProxyJump instead."),
    NoValidConnectionsError: Meaning(HostError, "no address of the host answers", SSHD),
    NeedRekeyException: Meaning(HostError, "the key exchange was interrupted", AGAIN),
    CouldNotCanonicalize: Meaning(InputError, "the host name could not be completed", CONFIG),
    ConfigParseError: Meaning(InputError, "the SSH configuration cannot be read", CONFIG),
    InvalidHostKey: Meaning(InputError, "a line of known_hosts is damaged", "Remove that line."),
    UnknownKeyType: Meaning(InputError, "the key is of an unknown type", "Use an Ed25519, ECDSA or RSA key."),
    BERException: Meaning(InputError, "the key file is damaged", "Use another key, or restore that file."),
    SFTPError: Meaning(HostError, "the host answered something that is not SFTP", "Let ~/.bashrc print nothing when not interactive."),
    PipeTimeout: Meaning(HostError, "the host did not answer in time", AGAIN),
    EOFError: Meaning(HostError, "the connection ended", AGAIN),
    TimeoutError: Meaning(HostError, "the host did not answer in time", AGAIN),
    ConnectionRefusedError: Meaning(HostError, "nothing listens at that address and port", SSHD),
    ConnectionError: Meaning(HostError, "the connection was cut", AGAIN),
    socket.gaierror: Meaning(HostError, "the host name is not known", "Correct `hostname`, or give an address."),
    socket.herror: Meaning(HostError, "the host name is not known", "Correct `hostname`, or give an address."),
    UnicodeError: Meaning(InputError, "a name is not valid UTF-8", "Rename that file or directory."),
}  # fmt: skip
"""Every exception class that paramiko defines, and the sockets' own. Bare OSError is told by its number, see `_number`."""

FOREIGN: tuple[type[BaseException], ...] = (*MEANINGS, OSError)
"""What an `except` around a call of paramiko must name."""

UNREADABLE: tuple[type[BaseException], ...] = (*FOREIGN, ValueError)
"""What an `except` around reading a key or a configuration must name."""

_NUMBERS: dict[int, Meaning] = {
    errno.EHOSTUNREACH: Meaning(HostError, "there is no route to the host", SSHD),
    errno.ENETUNREACH: Meaning(HostError, "there is no route to the host", SSHD),
    errno.ENOENT: Meaning(InputError, "there is no such file or directory", "Check the path."),
    errno.ENOTDIR: Meaning(InputError, "a part of the path is no directory", "Check the path."),
    errno.EISDIR: Meaning(InputError, "a directory stands where a file was expected", "Check the path."),
    errno.ENOTEMPTY: Meaning(StorageError, "a directory that is not empty stands there", "Remove it and run again."),
    errno.EEXIST: Meaning(StorageError, "something stands there already", "Remove it and run again."),
    errno.EACCES: Meaning(StorageError, "permission is denied", "Check the owner and mode of that path."),
    errno.EPERM: Meaning(StorageError, "permission is denied", "Check the owner and mode of that path."),
    errno.EROFS: Meaning(StorageError, "the disk is read-only", "Check the disk of that host."),
    errno.ENOSPC: Meaning(StorageError, "no space is left on the disk", KEPT),
    errno.EDQUOT: Meaning(StorageError, "the disk quota is used up", KEPT),
    errno.EFBIG: Meaning(StorageError, "the file is too large for that disk", KEPT),
    errno.EIO: Meaning(StorageError, "the disk failed", "Check the disk of that host."),
}
_GONE = Meaning(HostError, "the connection ended", AGAIN)
_NO_REASON = Meaning(StorageError, "the SFTP server refused without giving a reason", "Check path, owner and free space there.")
_SYSTEM = Meaning(HostError, "the system refused", AGAIN)
_SCRIPT = Meaning(HostError, "a script failed", "Look at that host; the message above is its own.")
_STATUSES: dict[int, Meaning] = {
    paramiko.sftp.SFTP_NO_SUCH_FILE: _NUMBERS[errno.ENOENT],
    paramiko.sftp.SFTP_PERMISSION_DENIED: _NUMBERS[errno.EACCES],
    paramiko.sftp.SFTP_NO_CONNECTION: _GONE,
    paramiko.sftp.SFTP_CONNECTION_LOST: _GONE,
}

_SAID: tuple[tuple[str, int], ...] = (
    ("No space left on device", errno.ENOSPC),
    ("Disk quota exceeded", errno.EDQUOT),
    ("File too large", errno.EFBIG),
    ("Read-only file system", errno.EROFS),
    ("Input/output error", errno.EIO),
    ("Permission denied", errno.EACCES),
    ("Operation not permitted", errno.EPERM),
    ("No such file or directory", errno.ENOENT),
    ("No such file", errno.ENOENT),
    ("Directory nonexistent", errno.ENOENT),
    ("Not a directory", errno.ENOTDIR),
    ("Is a directory", errno.EISDIR),
    ("Directory not empty", errno.ENOTEMPTY),
    ("File exists", errno.EEXIST),
)
"""How the tools of a POSIX system end a line, in the C locale."""


def translate(error: BaseException, *, host: str, doing: str) -> EvalError:
    """The EvalError for any error of paramiko, a socket or SFTP, met on `host` while `doing` something ("reading /a")."""
    meaning = _meaning(error)
    detail = _detail(error)
    return meaning.kind(f"[{host}] {meaning.what} while {doing}{f' ({detail})' if detail else ''}.", meaning.fix)


@contextmanager
def translated(host: str, doing: str) -> Iterator[None]:
    """A body whose foreign errors leave as EvalError."""
    try:
        yield
    except FOREIGN as exc:
        raise translate(exc, host=host, doing=doing) from exc


def script_failed(host: str, doing: str, *, exit_code: int, stderr: bytes) -> EvalError:
    """The EvalError for a script that ended with another code than 0 and said `stderr` (in the C locale)."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    said = f": {lines[-1][:300]}" if lines else f" with exit code {exit_code} and no message"
    for line in reversed(lines):
        for ending, number in _SAID:
            if line.endswith(ending):
                meaning = _NUMBERS[number]
                return meaning.kind(f"[{host}] {meaning.what} while {doing}: {line[:300]}.", meaning.fix)
    return _SCRIPT.kind(f"[{host}] {_SCRIPT.what} while {doing}{said}.", _SCRIPT.fix)


def sftp_refused(host: str, doing: str, *, code: int, message: str) -> EvalError:
    """The EvalError for a status that an SFTP server answered instead of what was asked for."""
    meaning = _STATUSES.get(code, _NO_REASON)
    return meaning.kind(f"[{host}] {meaning.what} while {doing}{f' ({message})' if message else ''}.", meaning.fix)


def _meaning(error: BaseException) -> Meaning:
    for cls in type(error).__mro__:
        if cls in MEANINGS:
            return MEANINGS[cls]
    return _number(error) if isinstance(error, OSError) else _SYSTEM


def _number(error: OSError) -> Meaning:
    if error.errno is not None:
        return _NUMBERS.get(error.errno, _SYSTEM)
    return _GONE if str(error) in ("Socket is closed", "File is closed") else _NO_REASON


def _detail(error: BaseException) -> str:
    """The error's own words, cut short; "" where it has none."""
    try:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    except (AttributeError, TypeError):  # UnknownKeyType without bytes cannot print itself
        return type(error).__name__
    return " ".join(text.split())[:200].rstrip(".")
