"""Runs on a host: takes, renews or releases the lock of one of its GPUs. It is sent there as text (see gpu_lock.py), so it
imports nothing but the standard library.

    python -I - ORDER        ORDER, a JSON object, says what to `do` in which `directory`; the answer is one JSON object
    take     {token, holder, process, ttl_s, gpus, min_free_mib} ->  {gpu, cuda, instead_of} or {gpu: null, refused: [...]}
    renew    {token, ttl_s, gpu}                                 ->  {held}
    release  {token, gpu}                                        ->  {held}

A lock is the file gpu-N: {holder, taken_at, expires_at, process, token}, times by this host's clock. It is free once it has
expired, unless its holder is a process of this machine that still runs (it may be stopped). Whoever looks at locks in order to
change them holds the guard, a lock of the kernel's that ends with its process: so nothing comes between look and change, and
nobody who is killed in between is in anyone's way.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

NVIDIA_SMI = "nvidia-smi"
QUERY = ("--query-gpu=index,memory.free,memory.total", "--format=csv,noheader,nounits")
LOOK_TIMEOUT_S = 20.0
KILL_WAIT_S = 1.0
UNKNOWN_HOLDER = "an unknown holder"


def take(order: dict[str, Any]) -> dict[str, Any]:
    """Take the first of `gpus` that is free and has the memory, or say of each why not."""
    directory = Path(order["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    memory, problem = look_at_memory()
    if problem is not None:
        return {"gpu": None, "refused": [{"problem": problem}]}
    refused: list[dict[str, Any]] = []
    with guarded(directory):
        for gpu in order["gpus"]:
            path = directory / f"gpu-{gpu}"
            lock = read_lock(path, ttl_s=order["ttl_s"])
            expired = lock is None or lock["expires"] <= time.time()
            if lock is not None and (not expired or runs_here(lock["process"])):
                held = {"holder": lock["holder"], "expires_at": spelled(lock["expires"]), "expired": expired}
                refused.append({"gpu": gpu, **held})
                continue
            lacking = None if memory is None else lack_of_memory(memory, gpu, order["min_free_mib"])
            if lacking is not None:
                refused.append({"gpu": gpu, **lacking})
                continue
            write_lock(path, order)
            return {"gpu": gpu, "cuda": memory is not None, "instead_of": lock["holder"] if lock else None}
    return {"gpu": None, "refused": refused}


def renew(order: dict[str, Any]) -> dict[str, Any]:
    """Put the expiry off, unless the lock has another holder or none by now."""
    path = Path(order["directory"]) / f"gpu-{order['gpu']}"
    if not path.parent.is_dir():
        return {"held": False}
    with guarded(path.parent):
        lock = read_lock(path, ttl_s=order["ttl_s"])
        held = lock is not None and lock["token"] == order["token"]
        if held:
            # In place and of the same length: that works on a full disk, too.
            content = json.loads(path.read_text()) | {"expires_at": spelled(time.time() + order["ttl_s"])}
            with path.open("r+") as file:
                file.write(json.dumps(content))
                file.truncate()
        return {"held": held}


def release(order: dict[str, Any]) -> dict[str, Any]:
    """Remove the lock, unless it has another holder by now."""
    path = Path(order["directory"]) / f"gpu-{order['gpu']}"
    if not path.parent.is_dir():
        return {"held": False}
    with guarded(path.parent):
        lock = read_lock(path, ttl_s=0.0)
        held = lock is not None and lock["token"] == order["token"]
        if held:
            path.unlink()
        return {"held": held}


@contextlib.contextmanager
def guarded(directory: Path) -> Iterator[None]:
    """Hold the guard; waits for whoever holds it, which is never for long."""
    with (directory / ".guard").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_lock(path: Path, *, ttl_s: float) -> dict[str, Any] | None:
    """{holder, token, process, expires} of a lock file, None where there is none. One that cannot be read was taken when written."""
    try:
        with path.open() as file:
            changed = os.fstat(file.fileno()).st_mtime
            content = json.loads(file.read())
        return {
            "holder": str(content["holder"]),
            "token": content.get("token"),
            "process": content.get("process"),
            "expires": seconds_of(content["expires_at"]),
        }
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"holder": UNKNOWN_HOLDER, "token": None, "process": None, "expires": changed + ttl_s}


def write_lock(path: Path, order: dict[str, Any]) -> None:
    """Make the caller of `take` the holder. Only under the guard."""
    now = time.time()
    content = {
        "holder": order["holder"],
        "taken_at": spelled(now),
        "expires_at": spelled(now + order["ttl_s"]),
        "process": order["process"],
        "token": order["token"],
    }
    part = path.with_name(f".{path.name}.new")
    part.write_text(json.dumps(content))
    part.replace(path)


def runs_here(process: Any) -> bool:
    """True where {pid, start_ticks, boot_id} is a process of this machine that has not ended. A number alone names nothing."""
    try:
        if Path("/proc/sys/kernel/random/boot_id").read_text().strip() != process["boot_id"]:
            return False
        state, *fields = Path(f"/proc/{int(process['pid'])}/stat").read_bytes().rpartition(b")")[2].split()
        return state not in (b"Z", b"X") and int(fields[18]) == process["start_ticks"]
    except (OSError, TypeError, KeyError, ValueError, IndexError):
        return False


def look_at_memory() -> tuple[dict[int, tuple[float, float] | None] | None, str | None]:
    """({GPU: (free, total) in MiB, None where it does not tell}, None); (None, None) without nvidia-smi; (None, why it fails)."""
    program = shutil.which(NVIDIA_SMI)
    if program is None:
        return None, None
    child = subprocess.Popen([program, *QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        said = child.communicate(timeout=LOOK_TIMEOUT_S)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=KILL_WAIT_S)  # no longer: on a hung driver it does not even end by signal 9
        if child.stdout is not None:
            child.stdout.close()
        return None, f"{NVIDIA_SMI} does not answer within {LOOK_TIMEOUT_S:g} s"
    try:
        rows = [line.split(",") for line in said.splitlines() if line.strip()]
        found = {int(index): memory_of(free, total) for index, free, total in rows}
    except ValueError:
        found = {}
    if child.returncode != 0 or not found:
        return None, f"{NVIDIA_SMI} fails: {' '.join(said.split())[:200].rstrip('.') or f'exit code {child.returncode}'}"
    return found, None


def memory_of(free: str, total: str) -> tuple[float, float] | None:
    """Both as numbers; None where one is "[N/A]", as on a GPU that is cut in parts or shares the CPU's memory."""
    try:
        return float(free), float(total)
    except ValueError:
        return None


def lack_of_memory(memory: dict[int, tuple[float, float] | None], gpu: int, min_free_mib: float | None) -> dict[str, Any] | None:
    """What speaks against a GPU: it is not there, or less than `min_free_mib` of its memory is free. None: nothing known."""
    if gpu not in memory:
        return {"there_are": sorted(memory)}
    known = memory[gpu]
    if known is None or min_free_mib is None or known[0] >= min_free_mib:
        return None
    return {"free_mib": known[0], "total_mib": known[1]}


def spelled(seconds: float) -> str:
    """A time as text of constant length."""
    moment = datetime.fromtimestamp(seconds, timezone.utc)  # noqa: UP017 - a host's Python may be older than ours
    return moment.isoformat(timespec="milliseconds")


def seconds_of(value: Any) -> float:
    """A time as a lock file has it: text, or seconds since 1970. Raises ValueError, TypeError."""
    return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else float(value)


def main() -> None:
    """Carry out the order in argv and print the answer."""
    order = json.loads(sys.argv[1])
    print(json.dumps({"take": take, "renew": renew, "release": release}[order["do"]](order)))


if __name__ == "__main__":
    main()
