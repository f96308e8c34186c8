"""`dflash-eval bundle` and `replay-bundle`: a few prompts of a finished run as one file, and that file replayed."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dflash_model.errors import InputError
from flows.environment import prepare

if TYPE_CHECKING:
    from flows.parameters import EvaluateParameters
    from tasks.bundle import BundledReplay


def bundle(run_name: str, *, home: Path, prompts: int, destination: Path | None, weights: bool) -> int:
    """Write the bundle of a run; returns the exit code. Raises EvalError, InputError where the run is not finished."""
    prepare(home)
    from flows.evaluate import place_of
    from flows.running import parameters_of_run
    from tasks.bundle import pack

    options = argparse.Namespace(run_name=run_name, redo_from=None, failover=True, place=[])
    parameters = parameters_of_run(home, options)
    run_file = home / "runs" / run_name / "run.json"
    if not run_file.is_file():
        raise InputError(f"Run {run_name} has not finished.", f"`dflash-eval rerun {run_name}` goes on.")
    run = json.loads(run_file.read_text(encoding="utf-8"))
    found = _replays(parameters, run_name)
    path = destination or Path(f"{run['run_id']}.bundle.zip")
    about = {"run_id": run["run_id"], "versions": run["versions"]}
    ids = pack(place_of(parameters).site(), found, path, prompts=prompts, about=about, weights=weights)
    console = Console()
    console.print(
        f"Bundle: {path} ({path.stat().st_size / 1e6:.1f} MB, prompts {', '.join(ids)})", highlight=False, soft_wrap=True
    )
    console.print(f"dflash-eval replay-bundle {path}", highlight=False, soft_wrap=True)
    return 0


def _replays(parameters: EvaluateParameters, run_name: str) -> list[BundledReplay]:
    """What the run's replay stages were asked and made, found by going through its stages without doing any."""
    from flows.evaluate import place_of
    from flows.pipeline import Outcome, evaluate_with
    from flows.plan import PlanBook
    from tasks.bundle import BundledReplay

    asked: dict[str, list[tuple[str, dict[str, str], dict[str, Any]]]] = {}

    class Noting(PlanBook):
        """A plan that remembers its replays."""

        def stage(
            self,
            name: str,
            *,
            hosts: Sequence[str],
            label: str,
            inputs: Mapping[str, Outcome | None],
            parameters: dict[str, Any] | None,
            local: dict[str, Any] | None = None,
        ) -> Any:
            """As the plan does."""
            planned = super().stage(name, hosts=hosts, label=label, inputs=inputs, parameters=parameters, local=local)
            made = planned.made()
            if made is None:
                raise InputError(
                    f"{label} of run {run_name} is not there any more, or its checkpoint is no longer the newest match.",
                    f"Run `dflash-eval rerun {run_name}` first.",
                )
            if name == "replay" and parameters is not None:
                keys = {role: outcome.key for role, outcome in inputs.items() if outcome is not None}
                drafter = (
                    label.removeprefix("replay ").rpartition(" ")[0]
                    if parameters["shard"][1] > 1
                    else label.removeprefix("replay ")
                )
                asked.setdefault(drafter, []).append((made.key, keys, parameters))
            return planned

    evaluate_with(Noting(place_of(parameters)), parameters)
    return [
        BundledReplay(name=name, inputs=shards[0][1], parameters=shards[0][2], records=[key for key, _, _ in shards])
        for name, shards in asked.items()
    ]


def replay(path: Path, *, files: Sequence[Path]) -> int:
    """Replay a bundle here and say equal or different; 3 where anything differs. Raises EvalError."""
    from tasks.bundle import replay_bundle

    with tempfile.TemporaryDirectory(prefix="dflash-bundle-") as directory:
        differences = replay_bundle(path, Path(directory), threads=len(os.sched_getaffinity(0)), given=files)
    table = Table(box=None, header_style="bold")
    for column in ("drafter", "prompt", "replay", "largest difference"):
        table.add_column(column)
    for one in differences:
        table.add_row(one.drafter, one.sample_id, one.fault or "equal", f"{one.largest_nats:.1e} nats")
    console = Console()
    console.print(table)
    different = sum(one.fault is not None for one in differences)
    console.print(
        f"different: {different} of {len(differences)}" if different else f"equal: all {len(differences)}", highlight=False
    )
    return 3 if different or not differences else 0
