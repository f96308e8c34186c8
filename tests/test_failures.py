"""How a stage's bad end is told: class, sentence and fix."""

import json
from pathlib import Path

import pytest

from dflash_model.errors import EvalError, HostError, InputError, StageError, StageKilled
from tasks.remote.failures import stage_failure

LEFT = json.dumps({"kind": "input", "problem": "The prompts are wrong.", "fix": "Mend them."}).encode()
DEFECT = json.dumps({"kind": "stage", "problem": "Stage x failed with KeyError: 1.", "fix": "Report it."}).encode()


def failure(error_json: bytes | None, exit_code: int) -> EvalError:
    return stage_failure(error_json, exit_code=exit_code, peak_rss_bytes=3 << 20, what="[h] stage x", log_path=Path("/l"))


@pytest.mark.parametrize(
    ("left", "exit_code", "cls", "problem", "fix"),
    [
        (LEFT, 2, InputError, "[h] stage x: The prompts are wrong.", "Mend them."),
        (DEFECT, 70, StageError, "[h] stage x: Stage x failed with KeyError: 1.", "Report it. Log: /l"),
        (LEFT, -9, StageKilled, "[h] stage x was killed by signal 9, probably out of memory; peak memory was 3 MiB.", "Log: /l"),
        (LEFT, -11, StageKilled, "[h] stage x was ended by SIGSEGV; peak memory was 3 MiB.", "Log: /l"),
        (LEFT, -40, StageKilled, "[h] stage x was ended by signal 40; peak memory was 3 MiB.", "Log: /l"),
        (None, 1, HostError, "[h] stage x ended with exit code 1 and left no error.json.", "Read /l."),
        (b"", 1, HostError, "[h] stage x ended with exit code 1 and left no error.json.", "Read /l."),
        (b"[1]", 1, HostError, "[h] stage x ended with exit code 1 and left no error.json.", "Read /l."),
        (b"\xff", 1, HostError, "[h] stage x ended with exit code 1 and left no error.json.", "Read /l."),
    ],
)
def test_each_end_has_its_sentence(left: bytes | None, exit_code: int, cls: type[EvalError], problem: str, fix: str) -> None:
    error = failure(left, exit_code)
    assert type(error) is cls
    assert error.problem == problem
    assert fix in error.fix
