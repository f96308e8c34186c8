"""~/.ssh/config as paramiko reads it, with the one thing that it lacks: Include.

A missing file is an empty one. Nothing here resolves a host; endpoint.py does.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import paramiko

from dflash_model.errors import InputError
from tasks.remote.ssh_errors import UNREADABLE

MAX_DEPTH = 16
_DIRECTIVE = re.compile(r"\s*(include|host|match)(?:\s*=\s*|\s+)(.+?)\s*$", re.IGNORECASE)
_EVERY_HOST = "Host *"


def read_ssh_config(path: Path) -> paramiko.SSHConfig:
    """The configuration at `path` with its Includes in place. Raises InputError where it cannot be read or understood."""
    try:
        return paramiko.SSHConfig.from_text("\n".join(_lines(path, base=path.parent, header=_EVERY_HOST, depth=0)))
    except UNREADABLE as exc:
        raise InputError(f"{path} cannot be read as an SSH configuration: {exc}.", "Correct that line.") from exc


def _lines(path: Path, *, base: Path, header: str, depth: int) -> list[str]:
    """The lines of one file. After an included file, `header` is repeated: its Host lines must not swallow ours."""
    if depth > MAX_DEPTH:
        raise InputError(
            f"{path} is included more than {MAX_DEPTH} levels deep.", "Remove the Include that leads back to itself."
        )
    if not path.is_file():
        return []
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        directive = _DIRECTIVE.match(line)
        word = directive.group(1).lower() if directive else ""
        if directive is None or word != "include":
            header = line.strip() if word in ("host", "match") else header
            lines.append(line)
            continue
        for pattern in shlex.split(directive.group(2)):
            for found in _included(pattern, base):
                lines += _lines(found, base=base, header=header, depth=depth + 1)
        lines.append(header)
    return lines


def _included(pattern: str, base: Path) -> list[Path]:
    """Files of one Include pattern, in order; relative ones start at the directory of the first file."""
    path = base / Path(pattern).expanduser()
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
