"""Prefect beside our data: the UI in the foreground, the flow served as a scheduled deployment, a training run watched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from dflash_model.errors import InputError, from_os_error
from flows.environment import hand_over, prepare
from flows.server import prefect_server


def ui(*, home: Path, port: int) -> int:
    """Run `prefect server start` on the data below `home` until Ctrl-C; prints the address first."""
    prepare(home)
    print(f"Prefect UI: http://127.0.0.1:{port}/runs   (Ctrl-C ends it)", flush=True)
    env = os.environ | {"PREFECT_UI_URL": f"http://127.0.0.1:{port}"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    child = subprocess.Popen(command, env=env, start_new_session=True)

    def end(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGTERM)

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)
    child.wait()
    return 0


def serve(parameters_path: Path, *, home: Path, cron: str, timezone: str, name: str) -> int:
    """Serve the evaluation as deployment `evaluate/<name>` until Ctrl-C. Raises InputError for a bad parameters file."""
    prepare(home)
    with prefect_server(home / "prefect" / "server.log") as url:
        print(
            f"Prefect: {url.removesuffix('/api')}   deployment evaluate/{name}, {cron} {timezone}   (Ctrl-C ends it)", flush=True
        )
        from prefect.schedules import Cron

        from flows.evaluate import evaluate

        parameters = read_parameters(parameters_path, home)
        evaluate.serve(name=name, schedules=[Cron(cron, timezone=timezone)], parameters={"parameters": parameters}, limit=1)
    return 0


def read_parameters(path: Path, home: Path) -> dict[str, Any]:
    """The parameters of an evaluation from a YAML or JSON file, checked. Raises InputError naming the key."""
    from pydantic import ValidationError

    from flows.parameters import EvaluateParameters

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{path} is neither JSON nor YAML: {exc}.", "Correct that line.") from exc
    try:
        parameters = EvaluateParameters.model_validate({"home": str(home)} | (data if isinstance(data, dict) else {}))
    except ValidationError as exc:
        first = exc.errors()[0]
        raise InputError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}.", "Correct that key.") from exc
    plain: dict[str, Any] = parameters.model_dump(mode="json")
    return plain


def watch(parameters_path: Path, *, home: Path, every_s: float, once: bool) -> int:
    """Evaluate each checkpoint as it is saved until Ctrl-C, or what is there now with `once`. Raises EvalError."""
    prepare(home)
    from flows.parameters import EvaluateParameters
    from flows.running import run_on_server

    parameters = EvaluateParameters.model_validate(read_parameters(parameters_path, home))
    say = partial(print, flush=True)
    where = ", ".join(candidate.path for candidate in parameters.candidates)
    say(f"Watching {where}" + ("" if once else f", every {every_s:g} s   (Ctrl-C ends it)"))
    with prefect_server(Path(os.environ["PREFECT_HOME"]) / "server.log"):
        from flows.watching import keep_looking  # imports Prefect, which reads the server's address once

        try:
            keep_looking(parameters, evaluate=run_on_server, say=say, every_s=every_s, looks=1 if once else None)
        finally:
            hand_over()
    return 0
