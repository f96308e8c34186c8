"""A host in a directory whose GPUs are locked: others' locks on it, and an nvidia-smi that says what a test wants."""

import json
import sys
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from dflash_model.errors import HostBusy
from tasks.remote.gpu_lock import GpuLocks
from tasks.remote.local_shell import LocalShell
from tasks.remote.lock_program import spelled
from tasks.remote.shell import Shell

OTHER = "box-b pid 7 run x"


class GpuBench:
    """Without nvidia-smi unless a test writes one."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work_dir = directory / "a host's work dir"
        self._programs = directory / "bin"
        self._programs.mkdir()
        (self._programs / "sh").symlink_to("/bin/sh")
        monkeypatch.setenv("PATH", str(self._programs))

    def locks(
        self, gpus: tuple[int, ...] = (0,), *, lifetime_s: float = 60.0, shell: Shell | None = None, **given: Any
    ) -> GpuLocks:
        """As another relay would have them."""
        settings: dict[str, Any] = {"python": sys.executable, "min_free_gib": None} | given
        work_dir = PurePosixPath(self.work_dir)
        return GpuLocks(shell or LocalShell("h"), work_dir=work_dir, gpus=gpus, lifetime_s=lifetime_s, **settings)

    def lock_file(self, gpu: int = 0) -> Path:
        """Where the lock of a GPU is."""
        return self.work_dir / "locks" / f"gpu-{gpu}"

    def leave(self, *, expires_in_s: float, gpu: int = 0) -> float:
        """A lock of somebody elsewhere; when it expires."""
        return leave_lock(self.lock_file(gpu), expires_in_s=expires_in_s)

    def nvidia_smi(self, *rows: str) -> None:
        """From now on nvidia-smi answers these rows."""
        path = self._programs / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
        path.chmod(0o755)


def leave_lock(path: Path, *, expires_in_s: float) -> float:
    """Write a lock file as another relay's program does; when it expires."""
    path.parent.mkdir(parents=True, exist_ok=True)
    expires = time.time() + expires_in_s
    path.write_text(json.dumps({"holder": OTHER, "taken_at": spelled(time.time() - 60), "expires_at": spelled(expires)}))
    return expires


def busy(locks: GpuLocks) -> str:
    """Why no GPU can be had."""
    with pytest.raises(HostBusy) as caught, locks.holding("somebody"):
        pass
    return caught.value.problem


def span(path: Path) -> str:
    """Since when and until when a lock file holds, as a sentence says it."""
    lock = json.loads(path.read_text())
    since, until = (f"{lock[name][:10]} {lock[name][11:19]} UTC" for name in ("taken_at", "expires_at"))
    return f"since {since} until {until} or longer"


def name_gpus(inventory: Path) -> None:
    """Let both GPU hosts of the lab's inventory name a GPU."""
    content = yaml.safe_load(inventory.read_text())
    for name in ("gpu-a", "gpu-b"):
        content["hosts"][name] |= {"gpus": [0], "min_gpu_memory_gib": 1}
    inventory.write_text(yaml.safe_dump(content, sort_keys=False))
