"""Entry point of every stage program. The first statements move descriptor 1 out of every library's reach.

This is the one place in the product where every exception is caught: here it becomes error.json and an exit code.
"""

import os

ANSWER_DESCRIPTOR = os.dup(1)
os.dup2(2, 1)

import argparse  # noqa: E402
import importlib  # noqa: E402
import logging  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from types import FrameType  # noqa: E402

from dflash_model.errors import Cancelled, EvalError, InputError, StageError, from_os_error  # noqa: E402
from dflash_model.stages.protocol import EXIT_DEFECT, Context, Request  # noqa: E402
from dflash_model.stages.registry import STAGES  # noqa: E402
from dflash_model.storage import artifacts_dir, find_artifact, write_json  # noqa: E402

log = logging.getLogger("dflash_model.stages")


def _watch_parent() -> None:
    """Block on standard input; when the parent's end closes, end the whole process group."""
    while os.read(0, 1024):
        pass
    log.error("the runner went away; ending")
    os.killpg(os.getpgid(0), signal.SIGTERM)
    time.sleep(5)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _on_term(_signal: int, _frame: FrameType | None) -> None:
    raise Cancelled("The stage was ended on request.", "Run again; finished work is kept.")


def _run(stage_name: str, request_path: Path) -> None:
    request = Request.read(request_path)
    if request.stage != stage_name:
        raise InputError(f"{request_path} is a request for {request.stage}, not {stage_name}.", "Name the stage of the request.")
    stage = STAGES[stage_name]
    context = Context(request=request, kind=stage.kind, answer_descriptor=ANSWER_DESCRIPTOR)
    started = time.monotonic()
    if find_artifact(request.work_dir, request.key) is None:
        importlib.import_module(stage.module).run(context)
    manifest = find_artifact(request.work_dir, request.key)
    if manifest is None:
        raise StageError(
            f"Stage {stage_name} ended without a complete {artifacts_dir(request.work_dir) / request.key}.",
            "Report this with the stage's log.",
        )
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = round(time.monotonic() - started, 3)
    context.say("finished", key=request.key, digest=manifest.digest, seconds=seconds, peak_rss_bytes=peak_kib * 1024)


def main(argv: list[str] | None = None) -> int:
    """Run one stage; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dflash_model.stages", description="Run one stage of an evaluation by hand.")
    parser.add_argument("stage", choices=sorted(STAGES))
    parser.add_argument("request", type=Path, help="REQUEST.json; error.json is written beside it")
    parser.add_argument("--parent-pipe", action="store_true", help="end when standard input closes")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, _on_term)
    if options.parent_pipe:
        threading.Thread(target=_watch_parent, name="parent-watch", daemon=True).start()
    try:
        _run(options.stage, options.request)
        return 0
    except KeyboardInterrupt:
        error: EvalError = Cancelled("The stage was interrupted.", "Run again; finished work is kept.")
        code = error.exit_code
    except EvalError as exc:
        error, code = exc, exc.exit_code
    except OSError as exc:
        log.exception("stage %s", options.stage)
        error = from_os_error(exc, f"running stage {options.stage}")
        code = error.exit_code
    except MemoryError:
        error = StageError(f"Stage {options.stage} ran out of memory.", "Give the host more memory, or fewer threads and shards.")
        code = error.exit_code
    except Exception as exc:  # the one place: whatever a stage raises becomes error.json
        log.exception("stage %s", options.stage)
        error = StageError(
            f"Stage {options.stage} failed with {type(exc).__name__}: {exc}.",
            "This looks like a defect; report it with the stage's log.",
        )
        code = EXIT_DEFECT
    log.error("%s: %s", options.stage, error)
    _leave_error(options.request.parent / "error.json", error)
    return code


def _leave_error(path: Path, error: EvalError) -> None:
    try:
        write_json(path, error.to_json())
    except EvalError as exc:
        log.error("could not write %s: %s", path, exc)


if __name__ == "__main__":
    sys.exit(main())
