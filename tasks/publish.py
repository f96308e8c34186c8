"""Publishing a finished evaluation: result.json, run.json, report.html, and the Prefect artifacts. Never cached.

result.json depends on content alone, so two evaluations of the same things are the same bytes; what is true only of
this run (times, hosts, what was cached) is run.json.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact, create_table_artifact

from dflash_model.errors import StorageError
from dflash_model.history import evaluations
from dflash_model.parts import part_name
from dflash_model.report import render_report
from dflash_model.storage import read_json, write_file, write_json
from dflash_model.table import drafter_markdown
from tasks.settings import ALWAYS, RunPlace

log = logging.getLogger(__name__)
RESULT_FILE, RUN_FILE, REPORT_FILE = "result.json", "run.json", "report.html"


def write_run(comparison: Path, run: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Write the three files of a run into `directory`; returns result.json's content. Raises EvalError."""
    directory.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = read_json(comparison / RESULT_FILE)
    write_json(directory / RUN_FILE, run)
    write_file(directory / REPORT_FILE, render_report(result, run).encode())
    part = directory / part_name(RESULT_FILE)
    shutil.copyfile(comparison / RESULT_FILE, part)
    part.replace(directory / RESULT_FILE)
    _point_latest(directory)
    return result


def _point_latest(directory: Path) -> None:
    """`<runs>/latest` -> this run, replaced atomically."""
    link = directory.parent / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(directory.name)
    link.replace(directory.parent / "latest")


@task(name="publish", task_run_name="publish {run_id}", **ALWAYS)
def publish(run_id: str, comparison: str, run: dict[str, Any], place: dict[str, Any]) -> dict[str, Any]:
    """Write the run's files and show the verdict in Prefect."""
    directory = RunPlace(**place).directory
    result = write_run(Path(comparison), run, directory)
    try:
        evaluations(Path(place["home"]))
    except StorageError as exc:
        # The index is a copy: the next look at the history enters this run.
        log.warning("%s is not in the history yet: %s", run_id, exc.problem)
    warnings = "".join(f"- {one['name']}: {text}\n" for one in result["drafters"] for text in one.get("warnings", ()))
    text = f"{drafter_markdown(result)}\n\n{warnings and 'Warnings:' + chr(10) + warnings}\nReport: `{directory / REPORT_FILE}`\n"
    create_markdown_artifact(key="dflash-verdict", markdown=text, description=f"Verdict of {run_id}")
    create_table_artifact(key="dflash-stages", table=run["stages"], description=f"Stages of {run_id}")
    return result
