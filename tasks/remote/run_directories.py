"""Directories that trainers write as a whole run: which checkpoint files a match stands for.

SpecForge saves `<run>-step<N>/training_state.pt`, and `<run>-latest` points at the step that is complete. The pointer is
believed before the numbers: a step past it may still be on its way to the disk.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from dflash_model.errors import CheckpointError
from tasks.remote.host import FileFacts, Host, literal_pattern

STATE_FILE = "training_state.pt"
CONFIG_NAME = "config.json"
_STEP = re.compile(r"(.+)-step(\d+)")
_LATEST = "-latest"


def checkpoints_in(host: Host, match: FileFacts) -> list[FileFacts]:
    """What `match` stands for, newest first: the training states of a SpecForge run or step directory, else itself.

    Raises CheckpointError for a directory with several runs.
    """
    if not match.is_dir or host.stat(match.path / CONFIG_NAME) is not None:
        return [match]
    state = host.stat(match.path / STATE_FILE)
    if state is not None:
        return [state]
    states = host.glob(f"{literal_pattern(match.path)}/*/{STATE_FILE}")
    pointers = {one.path.parent.name.removesuffix(_LATEST): one for one in states if one.path.parent.name.endswith(_LATEST)}
    steps: dict[str, dict[int, FileFacts]] = {}
    for one in states:
        if found := _STEP.fullmatch(one.path.parent.name):
            steps.setdefault(found[1], {})[int(found[2])] = one
    runs = sorted(set(pointers or steps))
    if len(runs) > 1:
        raise CheckpointError(
            f"[{host.name}] {match.path} holds several runs: {', '.join(runs)}.", "Give one of its <run>-step<N> directories."
        )
    return _newest_first(pointers.get(runs[0]), steps.get(runs[0], {})) if runs else [match]


def _newest_first(pointed: FileFacts | None, steps: dict[int, FileFacts]) -> list[FileFacts]:
    ordered = [steps[number] for number in sorted(steps, reverse=True)]
    if pointed is None:
        return ordered
    same = next((number for number, one in steps.items() if _is_same(one, pointed)), None)
    if same is None:
        return [pointed]
    return [steps[number] for number in sorted(steps, reverse=True) if number <= same]


def _is_same(one: FileFacts, other: FileFacts) -> bool:
    """Whether two paths lead to one file; an inode of 0 tells nothing."""
    return (one.size_bytes, one.mtime_ns, one.inode) == (other.size_bytes, other.mtime_ns, other.inode)


def checkpoint_name(path: PurePosixPath) -> str:
    """How tables call the checkpoint file at `path`: its own name, or its step directory's where the file's is always the same."""
    return path.parent.name if path.name == STATE_FILE else path.stem
