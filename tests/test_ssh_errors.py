"""Foreign errors become ours: every exception class of paramiko has a meaning of its own, and none is forgotten."""

import errno
import importlib
import inspect
import pkgutil
import socket

import paramiko
import pytest
from paramiko.ssh_exception import NoValidConnectionsError, ProxyCommandFailure

from dflash_model.errors import EvalError, HostError, InputError, StorageError
from tasks.remote.ssh_errors import FOREIGN, MEANINGS, script_failed, sftp_refused, translate, translated

WINDOWS_ONLY = {"_winapi", "win_openssh", "win_pageant"}


def exception_classes() -> list[type[BaseException]]:
    """Every exception class that a module of paramiko defines."""
    found: set[type[BaseException]] = set()
    for info in pkgutil.iter_modules(paramiko.__path__):
        if info.name in WINDOWS_ONLY:
            continue
        module = importlib.import_module(f"paramiko.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, BaseException) and cls.__module__.startswith("paramiko"):
                found.add(cls)
    return sorted(found, key=lambda cls: cls.__name__)


def test_the_walk_finds_what_paramiko_defines() -> None:
    names = {cls.__name__ for cls in exception_classes()}
    assert {
        "SSHException",
        "SFTPError",
        "ConfigParseError",
        "PipeTimeout",
        "AuthFailure",
        "InvalidHostKey",
        "UnknownKeyType",
    } <= names
    assert len(names) >= 20


@pytest.mark.parametrize("cls", exception_classes(), ids=lambda cls: cls.__name__)
def test_every_exception_class_of_paramiko_has_a_meaning(cls: type[BaseException]) -> None:
    assert cls in MEANINGS, f"give {cls.__name__} a meaning in ssh_errors.py"
    assert issubclass(cls, FOREIGN)
    error = translate(cls.__new__(cls), host="gpu", doing="reading /a")
    assert type(error) is MEANINGS[cls].kind
    assert error.problem.startswith(f"[gpu] {MEANINGS[cls].what} while reading /a")
    assert error.problem.endswith(".")
    assert error.fix.endswith((".", ")."))


def test_a_class_without_a_meaning_would_be_noticed() -> None:
    class New(paramiko.SSHException):
        pass

    assert New not in MEANINGS
    assert translate(New("x"), host="h", doing="y").problem == "[h] the SSH connection failed while y (x)."


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), HostError, "nothing listens at that address"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), HostError, "the connection was cut"),
        (BrokenPipeError(errno.EPIPE, "x"), HostError, "the connection was cut"),
        (TimeoutError("timed out"), HostError, "did not answer in time"),
        (TimeoutError(errno.ETIMEDOUT, "x"), HostError, "did not answer in time"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), HostError, "the host name is not known"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), HostError, "there is no route"),
        (OSError(errno.ENETUNREACH, "x"), HostError, "there is no route"),
        (NoValidConnectionsError({("h", 22): OSError()}), HostError, "no address of the host answers"),
        (EOFError(), HostError, "the connection ended"),
        (OSError("Socket is closed"), HostError, "the connection ended"),
        (OSError("Failure"), StorageError, "refused without giving a reason"),
        (FileNotFoundError(errno.ENOENT, "x"), InputError, "no such file or directory"),
        (PermissionError(errno.EACCES, "x"), StorageError, "permission is denied"),
        (OSError(errno.ENOSPC, "x"), StorageError, "no space is left"),
        (OSError(errno.EDQUOT, "x"), StorageError, "quota"),
        (OSError(errno.EMFILE, "Too many open files"), HostError, "the system refused while reading /a (Too many open files)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), InputError, "not valid UTF-8"),
        (ProxyCommandFailure("nc", "1"), HostError, "ProxyCommand failed"),
        (paramiko.ChannelException(2, "open failed"), HostError, "opened no channel"),
    ],
)
def test_errors_of_sockets_and_sftp_are_told_apart(error: BaseException, kind: type[EvalError], words: str) -> None:
    ours = translate(error, host="gpu", doing="reading /a")
    assert type(ours) is kind
    assert words in ours.problem
    assert ours.problem.startswith("[gpu] ")
    assert ours.fix


@pytest.mark.parametrize(
    ("stderr", "kind", "words"),
    [
        (
            b"cat: write error: No space left on device\n",
            StorageError,
            "no space is left on the disk while writing /a: cat: write error",
        ),
        (b"sh: 1: cannot create /a: Permission denied\n", StorageError, "permission is denied"),
        (b"sh: 1: cannot open /a: No such file\n", InputError, "no such file"),
        (b"sh: line 1: /a: No such file or directory\nand more\n", InputError, "no such file"),
        (b"cat: /a/Permission denied/b: Is a directory\n", InputError, "a directory stands where a file was expected"),
        (b"touch: Read-only file system", StorageError, "read-only"),
        (b"strange\nwords\n", HostError, "a script failed while writing /a: words"),
        (b"", HostError, "a script failed while writing /a with exit code 3 and no message"),
        (b"\xff\xfe", HostError, "a script failed"),
    ],
)
def test_what_a_program_says_decides(stderr: bytes, kind: type[EvalError], words: str) -> None:
    error = script_failed("gpu", "writing /a", exit_code=3, stderr=stderr)
    assert type(error) is kind
    assert words in error.problem
    assert error.problem.startswith("[gpu] ")


def test_sftp_statuses_are_sentences() -> None:
    assert type(sftp_refused("h", "x", code=2, message="No such file")) is InputError
    assert type(sftp_refused("h", "x", code=3, message="")) is StorageError
    assert type(sftp_refused("h", "x", code=4, message="Failure")) is StorageError
    assert type(sftp_refused("h", "x", code=7, message="")) is HostError
    assert "(Failure)" in sftp_refused("h", "x", code=4, message="Failure").problem


def test_only_foreign_errors_are_translated() -> None:
    with pytest.raises(HostError, match=r"\[h\] the connection ended while x"), translated("h", "x"):
        raise EOFError
    with pytest.raises(KeyError), translated("h", "x"):
        raise KeyError("ours")
    with pytest.raises(InputError, match="own"), translated("h", "x"):
        raise InputError("own")
