"""The code that stage programs on other hosts run: the package dflash_model alone, as one archive named by its content.

It lies unpacked at `<work dir>/code/<digest>`, which is what PYTHONPATH is set to; a host gets each digest once.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import shlex
import uuid
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.abc import Traversable
from importlib.resources import files
from pathlib import PurePosixPath

from dflash_model.errors import HostError
from dflash_model.parts import part_name
from tasks.remote.command import program
from tasks.remote.shell import Shell

log = logging.getLogger(__name__)

PACKAGE = "dflash_model"
LOOK_TIMEOUT_S = 30.0
UNPACK_TIMEOUT_S = 120.0
_SHIPPED = (".py", ".j2", ".json", "py.typed")
_EPOCH = (1980, 1, 1, 0, 0, 0)

_UNPACK = """
import os, shutil, sys, zipfile
archive, part, final = sys.argv[1:]
try:
    with zipfile.ZipFile(archive) as source:
        source.extractall(part)
    for directory, _, names in os.walk(part):
        for name in names:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
    try:
        os.rename(part, final)
    except OSError:
        if not os.path.isdir(final):
            raise
finally:
    shutil.rmtree(part, ignore_errors=True)
    os.unlink(archive)
"""
"""Runs on the host. Whoever comes second finds `final` in place and drops its own copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeArchive:
    """A zip file with the layout of a wheel; the same source gives the same bytes."""

    content: bytes = field(repr=False)
    """The zip file; entries are stored, so that no compressor's version shows in the digest."""

    @property
    def digest(self) -> str:
        """First 24 hex digits of its sha256."""
        return hashlib.sha256(self.content).hexdigest()[:24]


@functools.lru_cache(maxsize=1)
def pack_code() -> CodeArchive:
    """The running program's own dflash_model: its modules and package data, nothing else."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, source in sorted(_shipped(files(PACKAGE), PACKAGE)):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, source.read_bytes())
    return CodeArchive(content=buffer.getvalue())


def _shipped(directory: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in directory.iterdir():
        name = f"{prefix}/{entry.name}"
        if entry.is_dir() and entry.name.isidentifier() and entry.name != "__pycache__":
            yield from _shipped(entry, name)
        elif entry.is_file() and entry.name.endswith(_SHIPPED) and not entry.name.startswith("."):
            yield name, entry


def ensure_code(shell: Shell, code: CodeArchive, *, work_dir: PurePosixPath, python: str) -> PurePosixPath:
    """The directory that holds `code` unpacked on the host; brought there if need be. Safe to call at the same time from anywhere.

    Raises HostError, StorageError.
    """
    final = work_dir / "code" / code.digest
    place = shlex.quote(str(final))
    # Touched: what was used last is kept longest.
    if shell.run(f"test -d {place} && {{ touch -c {place} || :; }}", timeout_s=LOOK_TIMEOUT_S).exit_code == 0:
        return final
    unique = f"{code.digest}.{uuid.uuid4().hex[:8]}"
    archive, part = final.with_name(part_name(f"{unique}.zip")), final.with_name(part_name(unique))
    shell.write_small(archive, code.content)
    words = ["-c", _UNPACK, str(archive), str(part), str(final)]
    done = shell.run(f"{program(python)} {shlex.join(words)}", timeout_s=UNPACK_TIMEOUT_S)
    if done.exit_code != 0:
        reason = last_line(done.stderr)
        shell.run(shlex.join(["rm", "-rf", str(archive), str(part)]), timeout_s=LOOK_TIMEOUT_S)
        raise HostError(
            f"[{shell.name}] {python} could not unpack the code in {final.parent}: {reason}.",
            "Check `python` and the work directory of that host.",
        )
    log.info("[%s] code %s brought, %d bytes", shell.name, code.digest, len(code.content))
    return final


def last_line(stderr: bytes) -> str:
    """What a program said last, for a sentence: without its final full stop."""
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip().rstrip(".") if lines else "it said nothing"
