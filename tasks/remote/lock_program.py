"""Runs on a host: takes, renews or releases the lock of one of its GPUs. It is sent there as text (see gpu_lock.py), so it
imports nothing but the standard library.

    python -I - ORDER        ORDER, a JSON object, says what to `do` in which `directory`; the answer is one JSON object
    take     {token, holder, process, ttl_s, gpus, min_free_mib, runs, ticket} ->  {gpu, cuda, instead_of} or {gpu: null, refused: [...]}
    renew    {token, ttl_s, gpu}                                               ->  {held}
    release  {token, gpu}                                                      ->  {held}
    leave    {ticket}                                                          ->  {held}

A lock is the file gpu-N: {holder, taken_at, expires_at, process, token}, times by this host's clock. It is free once it has
expired, unless its holder is a process of this machine that still runs (it may be stopped), or a stage below `runs` that was
given this GPU still has its supervisor: a relay that died leaves its stage to its lease, and not a moment longer is the GPU
taken. Whoever waits gives a `ticket`: the file `queue` has those who wait in the order in which they came, and forgets whoever
does not ask again. Whoever looks at any of this in order to change it holds the guard, a lock of the kernel's that ends with
its process: so nothing comes between look and change, and nobody who is killed in between is in anyone's way.
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
FORGOTTEN_S = 60.0
"""Whoever waits asks again sooner than this, or has gone."""


def take(order: dict[str, Any]) -> dict[str, Any]:
    """Take the first of `gpus` that is free and has the memory, or say of each why not."""
    directory = Path(order["directory"])
    directory.mkdir(parents=True, exist_ok=True)
    memory, problem = look_at_memory()
    if problem is not None:
        return {"gpu": None, "refused": [{"problem": problem}]}
    refused: list[dict[str, Any]] = []
    with guarded(directory):
        queue = Queue(directory / "queue", order.get("ticket"))
        used = gpus_in_use(order.get("runs"))
        for gpu in order["gpus"]:
            path = directory / f"gpu-{gpu}"
            lock = read_lock(path, ttl_s=order["ttl_s"])
            why = why_taken(lock, used.get(gpu)) or queue.who_is_before(gpu)
            lacking = None if memory is None else lack_of_memory(memory, gpu, order["min_free_mib"])
            if why or lacking:
                refused.append({"gpu": gpu, **(why or lacking or {})})
                continue
            write_lock(path, order)
            queue.leave()
            return {"gpu": gpu, "cuda": memory is not None, "instead_of": lock["holder"] if lock else None}
        queue.wait(order["holder"], order["gpus"])
    return {"gpu": None, "refused": refused}


def why_taken(lock: dict[str, Any] | None, run: str | None) -> dict[str, Any] | None:
    """What speaks against a GPU with this lock, used by the stage in the directory `run`; None: it is free."""
    if lock is None:
        return None if run is None else {"run": run}
    expired = lock["expires"] <= time.time()
    if expired and run is None and not runs_here(lock["process"]):
        return None
    times = {"taken_at": lock["taken_at"], "expires_at": spelled(lock["expires"])}
    return {"holder": lock["holder"], "expired": expired, "run": run} | times


def gpus_in_use(runs: str | None) -> dict[int, str]:
    """GPU -> directory of a stage that was given it and whose supervisor lives; `runs`: where this host's stages run."""
    found = {}
    for pid_file in Path(runs).glob("*/pid") if runs else ():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            gpu = json.loads((pid_file.parent / "request.json").read_text())["local"].get("gpu")
            if gpu is not None and runs_here(json.loads(pid_file.read_text())):
                found[int(gpu)] = str(pid_file.parent)
    return found


class Queue:
    """Those who wait, in the order in which they came: {ticket, holder, gpus, since, seen}. Only under the guard."""

    def __init__(self, path: Path, ticket: str | None) -> None:
        self._path, self._ticket = path, ticket
        self._found = self._read()
        fresh = time.time() - FORGOTTEN_S
        self._waiting = [one for one in self._found if one["seen"] > fresh]

    def who_is_before(self, gpu: int) -> dict[str, Any] | None:
        """The first who waits for this GPU and came before; None where nobody did."""
        for one in self._waiting:
            if one["ticket"] == self._ticket:
                return None
            if gpu in one["gpus"]:
                return {"next": one["holder"], "since": spelled(one["since"])}
        return None

    def wait(self, holder: str, gpus: list[int]) -> None:
        """Note that the caller waits on; without a ticket it does not."""
        now = time.time()
        mine = next((one for one in self._waiting if one["ticket"] == self._ticket), None)
        if mine is None and self._ticket is not None:
            mine = {"ticket": self._ticket, "holder": holder, "gpus": list(gpus), "since": now}
            self._waiting.append(mine)
        if mine is not None:
            mine["seen"] = now
        self._write()

    def leave(self) -> None:
        """The caller waits no more."""
        self._waiting = [one for one in self._waiting if one["ticket"] != self._ticket]
        self._write()

    def _read(self) -> list[dict[str, Any]]:
        try:
            keys = ("ticket", "holder", "gpus", "since", "seen")
            return [{key: one[key] for key in keys} for one in json.loads(self._path.read_text())]
        except (OSError, ValueError, KeyError, TypeError):
            return []  # nobody waits, or the file is damaged: then those who wait come again, in the order of their asking

    def _write(self) -> None:
        if self._waiting:
            part = self._path.with_name(f".{self._path.name}.new")
            part.write_text(json.dumps(self._waiting))
            part.replace(self._path)
        elif self._path.exists():
            self._path.unlink()


def leave(order: dict[str, Any]) -> dict[str, Any]:
    """Wait no more."""
    directory = Path(order["directory"])
    if directory.is_dir():
        with guarded(directory):
            Queue(directory / "queue", order["ticket"]).leave()
    return {"held": False}


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
    """{holder, token, process, taken_at, expires} of a lock file, None where there is none. One that cannot be read was taken when written."""
    try:
        with path.open() as file:
            changed = os.fstat(file.fileno()).st_mtime
            content = json.loads(file.read())
        return {
            "holder": str(content["holder"]),
            "token": content.get("token"),
            "process": content.get("process"),
            "taken_at": spelled(seconds_of(content.get("taken_at", changed))),
            "expires": seconds_of(content["expires_at"]),
        }
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return {
            "holder": UNKNOWN_HOLDER,
            "token": None,
            "process": None,
            "taken_at": spelled(changed),
            "expires": changed + ttl_s,
        }


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
    print(json.dumps({"take": take, "renew": renew, "release": release, "leave": leave}[order["do"]](order)))


if __name__ == "__main__":
    main()
