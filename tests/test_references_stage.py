"""The references stage with an engine: nothing is asked twice, the key stays secret, kill -9 loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_model.stages import identify_target, references
from dflash_model.stages.protocol import Context, Request
from dflash_model.storage import find_artifact, write_json, writing_artifact
from dflash_model.target.backbone import load_backbone
from dflash_model.target.prompts import load_tokenizer
from dflash_model.target.references import Reference, read_references
from tests.engine_server import EngineServer, Greedy, serving
from tests.tiny_targets import DEMO_PROMPTS, DEMO_TARGET

ROOT = Path(__file__).resolve().parent.parent
CHOSEN = {"from": "sglang", "max_new_tokens": 6, "overshoot_tokens": 2, "thinking": None, "dtype": None}
SECRET = "a-key-to-look-for"


@pytest.fixture(scope="module")
def greedy() -> Greedy:
    return Greedy(load_backbone(DEMO_TARGET, dtype="float32").model)


@pytest.fixture
def server(greedy: Greedy) -> Iterator[EngineServer]:
    with serving(EngineServer(greedy, load_tokenizer(DEMO_TARGET), model_path=str(DEMO_TARGET))) as running:
        running.key = SECRET
        yield running


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the target identified; the engine's key is in the environment."""
    monkeypatch.setenv("DFLASH_EVAL_ENGINE_KEY", SECRET)
    chosen = {"path": str(DEMO_TARGET), "host": "h", "listing": []}
    identify_target.run(_context(tmp_path, "identify-target", "target", {}, chosen, {}))
    return tmp_path


def _context(
    work_dir: Path, stage: str, key: str, inputs: dict[str, str], parameters: dict[str, Any], local: dict[str, Any]
) -> Context:
    request = Request(stage=stage, key=key, work_dir=work_dir, inputs=inputs, parameters=parameters, local=local)
    return Context(
        request=request, kind=stage, answer_descriptor=os.open(work_dir / "answers", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    )


def _prompts(work_dir: Path, count: int) -> str:
    key = f"prompts-{count}"
    if find_artifact(work_dir, key) is None:
        with writing_artifact(work_dir, kind="prompts", key=key) as writer:
            lines = DEMO_PROMPTS.read_text().splitlines()[:count]
            (writer.path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return key


def _request(work_dir: Path, server: EngineServer, count: int, key: str, **local: Any) -> Context:
    inputs = {"target": "target", "prompts": _prompts(work_dir, count)}
    where = {"target_path": str(DEMO_TARGET), "server": {"url": server.url, "concurrency": 1}}
    return _context(work_dir, "references", key, inputs, CHOSEN, where | local)


def _made(work_dir: Path, key: str) -> tuple[list[Reference], dict[str, Any]]:
    manifest = find_artifact(work_dir, key)
    assert manifest is not None
    return read_references(work_dir / "artifacts" / key / "references.jsonl"), manifest.made_by


def test_more_prompts_cost_only_theirs_and_a_second_time_nothing(work_dir: Path, server: EngineServer) -> None:
    references.run(_request(work_dir, server, 3, "r-a"))
    first, made_by = _made(work_dir, "r-a")
    # Who it is: at first, after each answer, after the round. A fixed prompt: before and after.
    assert made_by["requests"] == {"looks": 1 + 3 + 1, "checks": 2, "completions": 3, "continuations": 3}
    assert made_by["accepted_as"] == "files"
    before = dict(server.counts)
    references.run(_request(work_dir, server, 3, "r-b"))
    again, made_by = _made(work_dir, "r-b")
    assert (again, made_by["requests"], made_by["generated"]) == (first, {}, 0)
    assert dict(server.counts) == before
    references.run(_request(work_dir, server, 5, "r-c"))
    more, made_by = _made(work_dir, "r-c")
    assert more[:3] == first
    assert (made_by["requests"]["completions"], made_by["generated"], made_by["reused"]) == (2, 2, 3)
    # Only when asked for are they made anew.
    references.run(_request(work_dir, server, 3, "r-d", fresh=True))
    assert _made(work_dir, "r-d")[1]["generated"] == 3


def test_the_key_is_in_no_file_that_a_stage_leaves(work_dir: Path, server: EngineServer) -> None:
    references.run(_request(work_dir, server, 1, "r-a"))
    left = [path for path in work_dir.rglob("*") if path.is_file()]
    assert len(left) > 5
    assert [path for path in left if SECRET in path.read_text(errors="replace")] == []


def test_a_stage_killed_half_way_goes_on_where_it_was(work_dir: Path, server: EngineServer) -> None:
    request = _request(work_dir, server, 4, "r-a").request
    write_json(work_dir / "run" / "request.json", request.to_json())
    server.faults.extend(["", "", "hang"])
    command = [sys.executable, "-m", "dflash_model.stages", "references", str(work_dir / "run" / "request.json")]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE) as child:
        until = time.monotonic() + 120
        while server.counts["completion"] < 3 and child.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)
    assert server.counts["completion"] == 3
    assert find_artifact(work_dir, "r-a") is None
    references.run(_request(work_dir, server, 4, "r-a"))
    made, made_by = _made(work_dir, "r-a")
    assert len(made) == 4
    assert made_by["requests"]["completions"] == 2
    assert server.counts["completion"] == 5
    assert not list((work_dir / "samples").glob("*.pending.json"))
    assert json.loads((work_dir / "run" / "request.json").read_text())["local"]["server"]["concurrency"] == 1
