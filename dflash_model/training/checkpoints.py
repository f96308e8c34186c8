"""Training checkpoints: a raw torch file {model_state_dict, optimizer_state_dict, step, args}, whole or not there at all.

`step` counts finished steps. Reading one back never executes what its pickle names.
"""

from __future__ import annotations

import argparse
import errno
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_model.errors import CheckpointError, ConfigError, from_os_error

_NAME = re.compile(r"step-(\d+)\.pt")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return directory / f"step-{step:06d}.pt"


def newest_checkpoint(directory: Path) -> Path | None:
    """The checkpoint with the most steps below `directory`, or None."""
    found = [path for path in directory.glob("step-*.pt") if _NAME.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.stem.removeprefix("step-")), default=None)


def save_checkpoint(
    path: Path, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Any], step: int, args: Mapping[str, Any]
) -> None:
    """Write `path` by way of a `.part` file beside it. Raises EvalError where the disk refuses."""
    state = {
        "model_state_dict": {name: tensor.detach().to("cpu") for name, tensor in model.items()},
        "optimizer_state_dict": dict(optimizer),
        "step": step,
        "args": argparse.Namespace(**args),
    }
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise from_os_error(exc, f"writing {path}") from exc
    except RuntimeError as exc:  # torch's writer: a full disk, without an errno
        part.unlink(missing_ok=True)
        raise CheckpointError(f"{path} cannot be written: {exc}.", "Free disk space there and resume the run.") from exc


def load_checkpoint(path: Path, *, decides_weights: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote for a run with the same `decides_weights`.

    Raises CheckpointError where the file is damaged or not ours, ConfigError naming a setting that differs.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved = dict(vars(state["args"])["training"])
        int(state["step"])
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # what torch says of a file that ends too early
            raise from_os_error(exc, f"reading {path}") from exc
        raise _damaged(path, exc) from exc
    except (RuntimeError, pickle.UnpicklingError, KeyError, TypeError, ValueError, EOFError) as exc:
        raise _damaged(path, exc) from exc
    for key, value in decides_weights.items():
        if saved.get(key) != value:
            raise ConfigError(
                f"{path.name} was trained with {key} {saved.get(key)!r}, the config says {value!r}.",
                "Resume with the config it was started with, or start anew in another directory.",
            )
    return state


def _damaged(path: Path, exc: Exception) -> CheckpointError:
    return CheckpointError(f"{path} is no whole checkpoint of this trainer: {exc}.", "Delete it and resume again.")
