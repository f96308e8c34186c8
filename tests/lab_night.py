"""A night in the lab: who has what, its parameters, and its stores as they stood when it was done, for tests that begin there."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from lab import Lab

from dflash_model.stages.registry import STAGES
from flows.parameters import DrafterSource, EvaluateParameters, References, TargetSource
from tasks.events import Event, listening

DEMO = Path(__file__).resolve().parent.parent / "deployments" / "demo"
PROMPTS = 4
TIMINGS = {"lease_s": 8, "grace_s": 6, "silence_s": 3}
STORES = ("artifacts", "samples", "code")
MADE_BY = {"hidden-states": ("hidden-states", "states")}
"""Stage -> what the names of its artifacts begin with, where that is not its name alone."""


def run(given: EvaluateParameters, *listeners: Callable[[Event], None]) -> dict[str, Any]:
    """The flow in this process."""
    from flows.evaluate import evaluate

    def hear(event: Event) -> None:
        for listener in listeners:
            listener(event)

    with listening(hear):
        outcome: dict[str, Any] = evaluate(given)
    return outcome


def numbers(outcome: dict[str, Any]) -> Any:
    """What must not depend on where it ran: every drafter's step lists and figures."""
    return [{key: value for key, value in d.items() if key != "digest"} for d in outcome["result"]["drafters"]]


def make_checkpoint(path: Path) -> Path:
    """A raw training file of the bundled drafter after 110 steps."""
    maker = [sys.executable, str(DEMO / "make_checkpoints.py"), str(DEMO / "drafters" / "step-00110"), str(path), "--step", "110"]
    subprocess.run(maker, check=True)
    return path


def furnish(lab: Lab, checkpoint: Path) -> None:
    """Give each host what it has in real life."""
    place = lab.disk("train") / "work" / "checkpoints" / "step-00110.pt"
    place.parent.mkdir(parents=True)
    shutil.copy2(checkpoint, place)
    for gpu in ("gpu-a", "gpu-b"):
        shutil.copytree(DEMO / "target", lab.disk(gpu) / "work" / "models" / "target")
    shutil.copytree(DEMO / "drafters" / "step-00220", lab.disk("eval") / "work" / "models" / "reference")


def parameters_in(directory: Path, lab: Lab) -> EvaluateParameters:
    """Prompts and an inventory with short times below `directory`, and a run that takes them."""
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    inventory = yaml.safe_load(lab.hosts_file.read_text())
    for name, entry in inventory["hosts"].items():
        entry |= {"key": str(lab.key), "known_hosts": str(lab.known_hosts)} | TIMINGS
        entry["threads"] = 1 if name != "train" else entry.get("threads", 1)
    (directory / "hosts.yaml").write_text(yaml.safe_dump(inventory, sort_keys=False))
    return EvaluateParameters(
        home=str(directory / "home"),
        inventory=str(directory / "hosts.yaml"),
        candidates=[DrafterSource(host="train", path=str(lab.work / "checkpoints" / "step-*.pt"))],
        reference=DrafterSource(host="eval", path=str(lab.work / "models" / "reference")),
        target=TargetSource(path=str(lab.work / "models" / "target")),
        prompts=str(directory / "prompts.jsonl"),
        references=References(max_new_tokens=48),
        deadline_s=120,
    )


@dataclass(frozen=True, kw_only=True)
class FinishedNight:
    """A whole night that was run once in the lab, and all that it left."""

    outcome: dict[str, Any]
    kept: Path = field(repr=False)

    def restore(self, lab: Lab, night: EvaluateParameters, *, before: str | None = None) -> EvaluateParameters:
        """Put the stores back as they were, without what the stage `before` and all after it made. The run that finds them so."""
        names: Sequence[str] = list(STAGES)[list(STAGES).index(before) :] if before else ()
        gone = tuple(f"{prefix}-" for name in names for prefix in MADE_BY.get(name, (name,)))
        brought = bool(before) and "replay" in names  # what eval then has is what it made itself
        stores = {self.kept / name: lab.disk(name) / "work" for name in lab.hosts} | {
            self.kept / "relay": Path(str(night.home)) / "relay"
        }
        for kept, place in stores.items():
            for made in kept.glob("*/*"):
                listed = made.parent.name in ("artifacts", "ledger")
                foreign = brought and kept.name == "eval" and not made.name.startswith("extract-weights-")
                if not (listed and (made.name.startswith(gone) or foreign)):
                    to = place / made.relative_to(kept)
                    to.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copytree(made, to) if made.is_dir() else shutil.copy2(made, to)
            if before and list(STAGES).index(before) <= list(STAGES).index("references"):
                shutil.rmtree(place / "samples", ignore_errors=True)
        return night


def finish(lab: Lab, directory: Path, checkpoint: Path) -> FinishedNight:
    """Run the night and keep its stores below `directory`."""
    furnish(lab, checkpoint)
    before = lab.files("train")
    night = parameters_in(directory, lab)
    outcome = run(night)
    assert lab.files("train") == before
    kept = directory / "kept"
    for name in lab.hosts:
        for store in STORES:
            if (lab.disk(name) / "work" / store).is_dir():
                shutil.copytree(lab.disk(name) / "work" / store, kept / name / store)
    shutil.copytree(Path(str(night.home)) / "relay", kept / "relay")
    return FinishedNight(outcome=outcome, kept=kept)
