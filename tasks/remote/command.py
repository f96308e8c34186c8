"""How an sh script is put to a login shell, whatever shell that is and whatever its profile prints."""

from __future__ import annotations

import secrets
import shlex
from pathlib import PurePosixPath

import paramiko

LONGEST_BYTES = 120_000
"""Linux takes 128 KiB in one argument."""

VARIABLE = "DFLASH_EVAL_SCRIPT"
"""Tells our processes from others that got the same number."""

_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_/.,:=+@- ")


def quote(path: PurePosixPath | str) -> str:
    """A path or word as one word of an sh script."""
    return shlex.quote(str(path))


def program(path: str) -> str:
    """A program as one word of an sh script; `~/` in front is the home directory of the user there."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def command_line(script: str, *, marker: str, token: str) -> bytes:
    """What the login shell is given: `exec` of an sh that prints marker and pid on stdout, marker on stderr, then is `script`.

    The script is written with octal escapes, because csh breaks at a newline within quotes and fish reads backslashes in
    them; the marker is joined from halves, so that a shell that echoes its commands does not print it. `token` marks the
    process and all it starts, see `kill_script`. Raises ValueError where the script is too long for a command line.
    """
    half = len(marker) // 2
    first, second = marker[:half], marker[half:]
    head = f"printf '%s%s %s\\n' {first} {second} $$\nprintf '%s%s\\n' {first} {second} >&2\n"
    content = (head + script).encode("utf-8", "surrogateescape")
    encoded = "".join(chr(byte) if byte in _SAFE else f"\\0{byte:03o}" for byte in content)
    if len(encoded) > LONGEST_BYTES:
        raise ValueError(f"a script of {len(script)} characters is too long for a command line; send it on stdin to `sh -s`")
    return f"exec env {VARIABLE}={token} sh -c 'eval \"$(printf %b \"$1\")\"' sh '{encoded}'".encode()


def kill_script(pid: int | None, *, token: str) -> str:
    """A script that kills the process group `pid` if it is still the one that was started with `token`.

    `pid` None, where the link went before the number came: whatever bears the token.
    """
    mark = f"{VARIABLE}={token}"
    if pid is None:
        return (
            f"found=$(grep -ls {mark} /proc/[0-9]*/environ | sed 's|^/proc/||; s|/environ$||')\n"
            '[ -z "$found" ] || { kill -s TERM $found; sleep 0.3; kill -s KILL $found; } 2>/dev/null\n'
        )
    own = f"grep -q {mark} /proc/{pid}/environ"
    # Where there is no /proc the number alone must do. `kill -KILL -- -1` is not understood by dash, this is.
    return f"if [ ! -e /proc/self/environ ] || {own}; then kill -s TERM -- -{pid}; sleep 0.3; kill -s KILL -- -{pid}; fi 2>/dev/null\n"


def run_blindly(channel: paramiko.Channel, script: str, *, timeout_s: float) -> None:
    """Run a short script whose answer nobody needs. Raises paramiko's errors."""
    channel.settimeout(timeout_s)
    channel.exec_command(command_line(script, marker=secrets.token_hex(8), token=secrets.token_hex(8)))
    while channel.recv(1 << 20):
        pass
