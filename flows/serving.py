"""Prefect beside our data: the UI in the foreground, and the flow served as a scheduled deployment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import yaml

from dflash_model.errors import InputError, from_os_error
from flows.environment import prepare


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
    from prefect.schedules import Cron
    from pydantic import ValidationError

    from flows.evaluate import evaluate
    from flows.parameters import EvaluateParameters

    try:
        data = yaml.safe_load(parameters_path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise from_os_error(exc, f"reading {parameters_path}") from exc
    except yaml.YAMLError as exc:
        raise InputError(f"{parameters_path} is neither JSON nor YAML: {exc}.", "Correct that line.") from exc
    try:
        parameters = EvaluateParameters.model_validate({"home": str(home)} | (data if isinstance(data, dict) else {}))
    except ValidationError as exc:
        first = exc.errors()[0]
        raise InputError(f"{parameters_path}: {'.'.join(map(str, first['loc']))}: {first['msg']}.", "Correct that key.") from exc
    evaluate.serve(
        name=name,
        schedules=[Cron(cron, timezone=timezone)],
        parameters={"parameters": json.loads(parameters.model_dump_json())},
        limit=1,
    )
    return 0
