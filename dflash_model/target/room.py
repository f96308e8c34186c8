"""Whether a target has room on its device, and so how it is read: whole, or layer by layer.

A GPU may be somebody's serving engine's: what is free is looked at first, and what does not fit is refused with the
numbers or read layer by layer; nothing is tried to see whether it fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_model.errors import ConfigError, HostBusy
from dflash_model.target.weight_files import WeightFiles, open_weights

AUTO, FULL, STREAMING = "auto", "full", "streaming"
EXTRACTIONS = (AUTO, FULL, STREAMING)
HOST_SHARE = 0.8
"""Share of the free memory that a whole target may take: activations, the gate and the host's other work need the rest."""
GPU_WORK_BYTES = 1 << 30
"""Room on a GPU beside the weights: activations of one sequence, kernels' work space and the CUDA context."""
LAYERS_HELD = 2
"""Layers that may be in memory at once while one is exchanged for the next."""
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How a target is read, and why."""

    mode: str
    """"full" or "streaming"."""

    reason: str
    """The figures, as a phrase."""


def choose_extraction(
    asked: str, files: WeightFiles, *, dtype: torch.dtype, device: str, free_bytes: int, max_gpu_gib: float | None = None
) -> Choice:
    """Full where the weights fit into `free_bytes` (and `max_gpu_gib` on a GPU), else layer by layer.

    Raises ConfigError for an unknown wish, HostBusy where a GPU has not room even for what was asked.
    """
    if asked not in EXTRACTIONS:
        raise ConfigError(f"There is no extraction {asked!r}.", f"Use one of {', '.join(EXTRACTIONS)}.")
    weights, layer = files.parameter_bytes(dtype), files.layer_bytes(dtype)
    if device == "cpu":
        fits = weights <= HOST_SHARE * free_bytes
        figures = f"{_gib(weights)} of weights, {_gib(free_bytes)} of memory free"
        mode = asked if asked != AUTO else FULL if fits else STREAMING
        return Choice(mode=mode, reason=figures if asked == AUTO else f"asked for; {figures}")
    usable = free_bytes if max_gpu_gib is None else min(free_bytes, int(max_gpu_gib * _GIB))
    needed = {FULL: weights + GPU_WORK_BYTES, STREAMING: LAYERS_HELD * layer + GPU_WORK_BYTES}
    wanted = (FULL, STREAMING) if asked == AUTO else (asked,)
    bound = "" if max_gpu_gib is None else f", at most {max_gpu_gib:g} GiB allowed"
    figures = f"{_gib(weights)} of weights, {_gib(free_bytes)} of GPU memory free{bound}"
    for mode in wanted:
        if needed[mode] <= usable:
            return Choice(mode=mode, reason=figures if asked == AUTO else f"asked for; {figures}")
    least = min(needed[mode] for mode in wanted)
    raise HostBusy(
        f"The target does not fit onto {device}: {figures}; {_gib(least)} are needed for extraction {wanted[-1]}.",
        "Wait until the GPU is free, use another host, or extraction: streaming; nothing was loaded.",
    )


def require_room(directory: Path, *, dtype: torch.dtype, device: str) -> None:
    """Raises HostBusy, with the numbers, where the whole target does not fit into what is free on `device`."""
    choose_extraction(FULL, open_weights(directory), dtype=dtype, device=device, free_bytes=free_bytes_of(device))


def free_bytes_of(device: str) -> int:
    """Bytes that may still be taken on `device` ("cpu", or a CUDA device that is there)."""
    if device == "cpu":
        return free_host_bytes()
    free, _total = torch.cuda.mem_get_info(torch.device(device))
    return int(free)


def free_host_bytes(root: Path = Path("/")) -> int:
    """The kernel's estimate of free memory, less where a control group allows less. `root` is for tests."""
    free = _meminfo(root / "proc" / "meminfo")
    group = root / "sys" / "fs" / "cgroup"
    limit = _number(group / "memory.max")
    if limit is not None:
        stat = _fields(group / "memory.stat")
        held = (_number(group / "memory.current") or 0) - stat.get("inactive_file", 0) - stat.get("active_file", 0)
        free = min(free, max(0, limit - held))
    return free


def _meminfo(path: Path) -> int:
    kilobytes = _fields(path).get("MemAvailable:")
    if kilobytes is None:
        return torch.iinfo(torch.int64).max
    return kilobytes * 1024


def _fields(path: Path) -> dict[str, int]:
    """`name number ..` lines of a kernel file; {} where there is none."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB // 10 else f"{size / (1 << 20):.0f} MiB"
