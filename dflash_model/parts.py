"""Files in the making carry their writer in their name, so that anybody can tell whether it is dead; and what removes them.

`NAME.part-<place>-<pid>-<start>`: `place` names a boot of a machine and a process namespace of it, where `pid` is a process
that started `start` clock ticks after that boot. A number alone names nothing: numbers are used again, and a work directory
may be shared by machines. This file is also sent to hosts as text, so it imports nothing but the standard library.

    python -I - ORDER    ORDER is a JSON object, the answer another one
    {do: look, work_dir, kept_codes}  -> {found: [[path, writer, dead, age_s], ..]}   `dead` null: cannot be told there
    {do: remove, work_dir, paths}     -> {removed}
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SWEPT = ("artifacts", "ledger", "samples", "code")
"""Directories of a work directory that only we write to."""

STALE_AFTER_S = 24 * 3600.0
"""A part whose writer cannot be asked after is nobody's once nothing has moved in it for so long."""

_WRITER = re.compile(r"\.part-([0-9a-f]{8}-\d+-\d+)$")


def part_name(name: str) -> str:
    """What a file or directory `name` is called while this process writes it."""
    return f"{name}.part-{this_writer()}"


def this_writer() -> str:
    """This process as the name of a part has it."""
    return f"{this_place()}-{os.getpid()}-{_start_ticks(os.getpid())}"


@functools.lru_cache(maxsize=1)
def this_place() -> str:
    """This boot of this machine, and the namespace that process numbers count in; eight hex digits."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return hashlib.sha256(f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]  # noqa: PTH115
    return "00000000"


def writer_of(name: str) -> str | None:
    """The writer of a part by its name; None where the name tells none."""
    found = _WRITER.search(name)
    return found.group(1) if found else None


def is_dead(writer: str | None) -> bool | None:
    """Whether a writer has ended; None where that cannot be told from here."""
    if writer is None:
        return None
    place, pid, start = writer.split("-")
    if place != this_place() or place == "00000000":
        return None
    return _start_ticks(int(pid)) != int(start)


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where it does not run (a zombie does not)."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if state in (b"Z", b"X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0


def look(order: dict[str, Any]) -> dict[str, Any]:
    """All parts below the swept directories of `work_dir`, and of `code` the directories that nothing has used for long."""
    work_dir, now = Path(order["work_dir"]), time.time()
    found = []
    for part in _parts(work_dir):
        with contextlib.suppress(OSError):
            writer = writer_of(part.name)
            found.append([str(part), writer, is_dead(writer), now - _moved_at(part)])
    found += [[str(path), None, True, age_s] for path, age_s in _old_codes(work_dir / "code", order["kept_codes"])]
    return {"found": found}


def remove(order: dict[str, Any]) -> dict[str, Any]:
    """Remove what `look` found and was found dead; nothing else, whatever is asked."""
    work_dir, removed = Path(order["work_dir"]), 0
    for path in map(Path, order["paths"]):
        if not path.is_relative_to(work_dir) or path.relative_to(work_dir).parts[0] not in SWEPT or ".." in path.parts:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
        removed += 1
    return {"removed": removed}


def _parts(work_dir: Path) -> Iterator[Path]:
    for place in SWEPT:
        for directory, names, files in os.walk(work_dir / place):
            for name in [name for name in (*names, *files) if ".part-" in name]:
                yield Path(directory) / name
            names[:] = [name for name in names if ".part-" not in name]


def _moved_at(part: Path) -> float:
    """When something last moved in a file or directory."""
    times = [part.lstat().st_mtime]
    for directory, names, files in os.walk(part):
        for name in (*names, *files):
            with contextlib.suppress(OSError):
                times.append((Path(directory) / name).lstat().st_mtime)
    return max(times)


def _old_codes(code: Path, kept: int) -> list[tuple[Path, float]]:
    """Unpacked programs but the `kept` that were used last, unless they were used within a day or a process runs on one."""
    with contextlib.suppress(OSError):
        all_codes = [path for path in code.iterdir() if path.is_dir() and ".part-" not in path.name]
        ages = sorted((time.time() - path.stat().st_mtime, path) for path in all_codes)
        old = [(path, age_s) for age_s, path in ages[kept:] if age_s > STALE_AFTER_S]
        used = _environments() if old else b""
        return [(path, age_s) for path, age_s in old if os.fsencode(path.name) not in used]
    return []


def _environments() -> bytes:
    """The environments of all processes that we may look at."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((process / "environ").read_bytes())
    return b"\0".join(found)


if __name__ == "__main__":
    _order = json.loads(sys.argv[1])
    print(json.dumps({"look": look, "remove": remove}[_order["do"]](_order)))
