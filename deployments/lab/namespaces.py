"""What the kernel holds of a lab: network namespaces, cables and processes, all told by the lab's prefix."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 10.0


def run(*command: str) -> str:
    """Run a program; its output. Raises RuntimeError with what it said."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def namespaces(prefix: str) -> list[str]:
    """Network namespaces of the lab with this prefix, whoever made them."""
    names = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
    return [name for name in names if name.startswith(prefix)]


def processes(namespace: str) -> list[int]:
    """Every process in a network namespace, as numbered here."""
    return [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]


def first_process(namespace: str) -> int | None:
    """The pid, as numbered here, of what is process 1 inside; None where nothing runs."""
    for pid in processes(namespace):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text().splitlines()
            if next(line for line in status if line.startswith("NSpid")).split()[2:] == ["1"]:
                return pid
    return None


def command_lines(namespace: str) -> dict[int, str]:
    """pid -> command line of every process inside but process 1."""
    first = first_process(namespace)
    found = {}
    for pid in processes(namespace):
        with contextlib.suppress(OSError):
            inside = Path(f"/proc/{pid}/ns/pid").readlink() == Path(f"/proc/{first}/ns/pid").readlink()
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if inside and pid != first and line:  # a zombie has no command line
                found[pid] = line
    return found


def listens(namespace: str, port: int) -> bool:
    """True once a process inside listens on a TCP port."""
    first = first_process(namespace)
    if first is None:
        return False
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path(f"/proc/{first}/net/tcp").read_text().splitlines()[1:]]
        return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)
    return False


def kill(pids: list[int]) -> None:
    """Kill processes and wait until they are gone. Raises RuntimeError where they stay."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not soon(lambda: not any(alive(pid) for pid in pids)):
        raise RuntimeError(f"these processes of the lab do not end: {pids}")


def remove_all(prefix: str) -> None:
    """End every process of the lab with this prefix and take its network away."""
    names = namespaces(prefix)
    for namespace in names:
        kill(processes(namespace))
    # Cables first: deleting a namespace deletes them too, but only some time later.
    for link in json.loads(run("ip", "-j", "link") or "[]"):
        if link["ifname"].startswith(prefix):
            run("ip", "link", "del", link["ifname"])
    for namespace in names:
        run("ip", "netns", "del", namespace)


def soon(condition: Callable[[], bool], within_s: float = PATIENCE_S) -> bool:
    """Wait for a condition; False where it does not come true in time."""
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def alive(pid: int) -> bool:
    """A zombie is gone: only its parent has not looked yet."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
