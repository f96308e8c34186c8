"""`dflash-eval demo`: the whole evaluation on the bundled pair, across three directories that stand for three machines.

train/ gets two raw training checkpoints, gpu/ the target, eval/ the reference drafter. Everything is made once and kept,
so that a second demo finds all its work done.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dflash_model.errors import StageError, from_os_error
from dflash_model.storage import write_file
from flows.environment import prepare

if TYPE_CHECKING:
    from flows.parameters import EvaluateParameters

BUNDLE = Path(__file__).resolve().parent.parent / "deployments" / "demo"
STEPS = (55, 110)
REFERENCE_STEP = 220
MAX_NEW_TOKENS = 96


def run_demo(directory: Path) -> int:
    """Prepare `directory`, run the evaluation there, say where to look. Raises EvalError."""
    home = directory / "home"
    prepare(home)
    from flows.running import run

    console = Console()
    lay_out(directory, console)
    run(demo_parameters(directory, home))
    console.print("Runs in the Prefect UI: make ui", highlight=False)
    return 0


def lay_out(directory: Path, console: Console) -> None:
    """Give each host what it has in real life. Raises EvalError."""
    try:
        for source, place in (("target", "gpu/models/target"), (f"drafters/step-{REFERENCE_STEP:05d}", "eval/models/reference")):
            _copy_once(BUNDLE / source, directory / place)
    except OSError as exc:
        raise from_os_error(exc, f"preparing {directory}") from exc
    for step in STEPS:
        destination = directory / "train" / "checkpoints" / f"step-{step:05d}.pt"
        if not destination.exists():
            console.print(
                f"Writing a raw training checkpoint, step {step} ({destination.name}, optimizer state included)", highlight=False
            )
            _make_checkpoint(step, destination)
    hosts = (BUNDLE / "hosts.yaml").read_text(encoding="utf-8")
    write_file(directory / "hosts.yaml", hosts.encode())


def _copy_once(source: Path, place: Path) -> None:
    if place.exists():
        return
    part = place.with_name(f"{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    part.rename(place)


def _make_checkpoint(step: int, destination: Path) -> None:
    drafter = BUNDLE / "drafters" / f"step-{step:05d}"
    command = [sys.executable, str(BUNDLE / "make_checkpoints.py"), str(drafter), str(destination), "--step", str(step)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise StageError(f"{destination} could not be made: {made.stderr.strip()[-300:]}.", "Check the disk, then run again.")


def demo_parameters(directory: Path, home: Path) -> EvaluateParameters:
    """The demo's evaluation, once `lay_out` has prepared `directory`."""
    from flows.parameters import DrafterSource, EvaluateParameters, References, TargetSource

    checkpoints = directory / "train" / "checkpoints"
    return EvaluateParameters(
        home=str(home),
        inventory=str(directory / "hosts.yaml"),
        candidates=[
            DrafterSource(host="train", path=str(checkpoints / f"step-{STEPS[0]:05d}.pt")),
            DrafterSource(host="train", path=str(checkpoints / "step-*.pt")),
        ],
        reference=DrafterSource(host="eval", path=str(directory / "eval" / "models" / "reference")),
        target=TargetSource(host="gpu", path=str(directory / "gpu" / "models" / "target")),
        prompts=str(BUNDLE / "prompts.jsonl"),
        references=References(max_new_tokens=MAX_NEW_TOKENS),
        shards=2,
    )
