"""Stands in for a host's Python: runs the real stage entry point, with the stage `replay` replaced by one that misbehaves.

Called as `python fake_stage_interpreter.py -m dflash_model.stages NAME REQUEST ...`. What to do is in `parameters.do`.
"""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import dflash_model.errors
from dflash_model.errors import InputError


def run(context: Any) -> None:
    """Do what `parameters.do` says."""
    do = context.parameters["do"]
    print("a library prints where answers go")
    context.milestone(f"about to {do}")
    if do == "input error":
        raise InputError("The prompts are wrong.", "Mend them.")
    if do == "defect":
        raise ZeroDivisionError("oops")
    if do == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)
    if do == "need a package":
        importlib.import_module("no_such_package")
    if do == "count":
        _count(context)
    if do == "shout":
        sys.stderr.write("x" * 5_000_000)
    if do == "answer rubbish":
        os.write(context.answer_descriptor, b"rubbish\n\xff\xfe\n[1]\n")
    if do == "tell where":
        context.milestone(dflash_model.errors.__file__)
    if do == "forget":
        return
    with context.writing() as writer:
        (writer.path / "out.txt").write_text("half")
        if do == "kill":
            _ballast = bytearray(context.parameters.get("megabytes", 0) << 20)
            os.kill(os.getpid(), signal.SIGKILL)
        for role in context.request.inputs:
            (writer.path / f"{role}.txt").write_bytes((context.input_path(role) / "out.txt").read_bytes())
        (writer.path / "out.txt").write_text(do)
        context.progress(1, 1, "things")


def _count(context: Any) -> None:
    """Say the numbers from 0 to `parameters.count` - 1, `pause_s` apart; then wait for the file `until`, if one is named."""
    for number in range(context.parameters["count"]):
        context.say("counted", number=number)
        time.sleep(context.parameters.get("pause_s", 0))
    while "until" in context.parameters and not Path(context.parameters["until"]).exists():
        time.sleep(0.02)


def main() -> None:
    """Install the fake stage, then run `-m MODULE ARGUMENTS` as the interpreter would."""
    fake = types.ModuleType("dflash_model.stages.replay")
    fake.run = run  # type: ignore[attr-defined]
    sys.modules[fake.__name__] = fake
    module, *arguments = sys.argv[2:]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
