"""The flow on the bundled pair, through a real Prefect server: cached nights, lost files, killed stages, shared states."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_model.errors import ConfigError, EvalError, InputError, NotEvaluable, StageKilled
from dflash_model.storage import artifacts_dir, read_manifest
from flows.parameters import DrafterSource, EvaluateParameters, References, TargetSource
from tasks.events import Event, listening

pytestmark = pytest.mark.engine
ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "deployments" / "demo"
PROMPTS = 5
Living = Callable[[Path], list[str]]


@pytest.fixture
def home(tmp_path: Path, prefect_api: None) -> Path:
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def parameters(base: Path, **changes: Any) -> EvaluateParameters:
    values: dict[str, Any] = {
        "home": str(base / "home"),
        "candidates": [DrafterSource(path=str(DEMO / "drafters" / "step-00055"))],
        "reference": DrafterSource(path=str(DEMO / "drafters" / "step-00220")),
        "target": TargetSource(path=str(DEMO / "target")),
        "prompts": str(base / "prompts.jsonl"),
        "references": References(max_new_tokens=24),
        "deadline_s": 120,
    }
    return EvaluateParameters(**values | changes)


def run(given: EvaluateParameters, listener: Callable[[Event], None] = lambda _e: None) -> dict[str, Any]:
    from flows.evaluate import evaluate

    with listening(listener):
        outcome: dict[str, Any] = evaluate(given)
    return outcome


def states(outcome: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["state"] for row in outcome["stages"]}


def result_bytes(outcome: dict[str, Any]) -> bytes:
    return (Path(outcome["directory"]) / "result.json").read_bytes()


def find_dirs(home: Path, prefix: str) -> list[Path]:
    return sorted(artifacts_dir(home / "home" / "here").glob(f"{prefix}-*"))


def test_a_second_night_is_cached_identical_and_a_lost_file_is_made_anew(home: Path, living: Living) -> None:
    first = run(parameters(home))
    assert set(states(first).values()) == {"ran"}
    second = run(parameters(home))
    assert set(states(second).values()) == {"cached"}
    assert result_bytes(first) == result_bytes(second)
    assert first["directory"] != second["directory"]

    # One sample's states lose their file: the states stage alone runs again, and what it makes is the same content.
    part = find_dirs(home, "states")[0]
    (part / "states.safetensors").unlink()
    notes: list[str] = []
    third = run(parameters(home), lambda event: notes.append(event.message))
    assert {name for name, state in states(third).items() if state == "ran"} == {"hidden states"}
    assert (part / "states.safetensors").is_file()
    assert "fidelity WARN, 1 forward passes" in " ".join(notes)
    assert result_bytes(third) == result_bytes(first)
    assert living(home) == []


def test_more_prompts_and_other_taps_cost_only_what_is_new(home: Path) -> None:
    run(parameters(home))
    # A drafter with another tap: the same references, one more layer a sample.
    other = home / "other-taps"
    shutil.copytree(DEMO / "drafters" / "step-00110", other)
    config = json.loads((other / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [1, 3, 6]
    (other / "config.json").write_text(json.dumps(config))
    both = run(parameters(home, candidates=[DrafterSource(path=str(other))]))
    assert states(both)["references"] == "cached"
    new = [read_manifest(path).facts["taps"] for path in find_dirs(home, "states")]
    assert sorted(new) == sorted([[2, 5, 7]] * PROMPTS + [[4]] * PROMPTS)
    taus = {drafter["name"]: drafter["tau"]["pooled"] for drafter in both["result"]["drafters"]}
    # The reference reads the same layers from the same files as before, whoever else asked for more.
    alone = run(parameters(home, candidates=[DrafterSource(path=str(DEMO / "drafters" / "step-00055"))]))
    assert taus["step-00220"] == {d["name"]: d["tau"]["pooled"] for d in alone["result"]["drafters"]}["step-00220"]

    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[: PROMPTS + 2]
    (home / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    run(parameters(home))
    made = [read_manifest(path).made_by for path in find_dirs(home, "references")]
    assert sorted((m["generated"], m["reused"]) for m in made) == [(2, PROMPTS), (PROMPTS, 0)]


class Killer:
    """Kills the stage program of one stage, once, while it runs."""

    def __init__(self, label: str, home: Path) -> None:
        self._label, self._home, self.killed = label, home, False

    def __call__(self, event: Event) -> None:
        if event.what == "started" and event.stage == self._label and not self.killed:
            self.killed = True
            threading.Thread(target=self._kill, daemon=True).start()

    def _kill(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    words = (process / "cmdline").read_text().split("\0")
                except OSError:
                    continue
                if "dflash_model.stages" in words and any(word.startswith(str(self._home)) for word in words):
                    os.kill(int(process.name), signal.SIGKILL)
                    return
            time.sleep(0.002)


def test_each_killed_stage_is_said_and_the_next_run_goes_on(home: Path, living: Living) -> None:
    labels = [
        "identify target",
        "extract step-00220",
        "extract step-00055",
        "references",
        "target tables",
        "hidden states",
        "replay step-00220",
        "replay step-00055",
        "compare",
    ]
    done: set[str] = set()
    for label in labels:
        killer = Killer(label, home)
        with pytest.raises(StageKilled, match="killed by signal 9"):
            run(parameters(home), killer)
        assert killer.killed
        assert living(home) == []
        roots = [artifacts_dir(home / "home" / host) for host in ("here", "relay")]
        finished = {path.name for root in roots for path in root.glob("*") if ".part-" not in path.name}
        assert all((root / name / "manifest.json").is_file() for root in roots for name in finished if (root / name).exists())
        assert done <= finished, f"{label}: work of earlier runs was lost"
        done = finished
    outcome = run(parameters(home))
    assert states(outcome)["compare"] == "ran"
    assert states(outcome)["references"] == "cached"
    clean = run(parameters(home, home=str(home / "clean")))
    assert result_bytes(outcome) == result_bytes(clean)


def test_unfaithful_states_are_not_evaluable_and_no_tau_is_given(home: Path) -> None:
    run(parameters(home))
    references = find_dirs(home, "references")[0] / "references.jsonl"
    samples = home / "home" / "here" / "samples"
    for path in samples.glob("*.json"):
        data = json.loads(path.read_text())
        data["completion_ids"] = [(token * 7 + 11) % 500 for token in data["completion_ids"]]
        data["logprobs"] = None
        path.write_text(json.dumps(data))
    for host in ("here", "relay"):
        shutil.rmtree(artifacts_dir(home / "home" / host) / references.parent.name)
    with pytest.raises(NotEvaluable, match="not faithful"):
        run(parameters(home))
    runs = sorted(path for path in (home / "home" / "runs").iterdir() if not path.is_symlink())
    assert not (runs[-1] / "result.json").exists()
    assert json.loads((runs[-1] / "error.json").read_text())["kind"] == "not_evaluable"


def test_a_bare_checkpoint_takes_its_config_from_args_or_from_the_reference(home: Path) -> None:
    import subprocess
    import sys

    checkpoint = home / "step.pt"
    command = [
        sys.executable,
        str(DEMO / "make_checkpoints.py"),
        str(DEMO / "drafters" / "step-00110"),
        str(checkpoint),
        "--step",
        "110",
    ]
    subprocess.run(command, check=True)
    directory = run(parameters(home, candidates=[DrafterSource(path=str(DEMO / "drafters" / "step-00110"))]))
    bare = run(parameters(home, candidates=[DrafterSource(path=str(checkpoint))]))
    row, same = bare["result"]["drafters"][1], directory["result"]["drafters"][1]
    assert (row["name"], row["step"]) == ("step", 110)
    assert [r["steps"] for r in row["requests"]] == [r["steps"] for r in same["requests"]]


def edited_drafter(home: Path, **changes: Any) -> DrafterSource:
    """The reference drafter with some config keys changed (None: removed) and, with `tokenizer`, a tokenizer beside it."""
    shutil.copytree(DEMO / "drafters" / "step-00220", home / "edited")
    tokenizer = changes.pop("tokenizer", None)
    if tokenizer is not None:
        (home / "edited" / "tokenizer.json").write_text(tokenizer)
    config = json.loads((home / "edited" / "config.json").read_text()) | changes
    (home / "edited" / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return DrafterSource(path=str(home / "edited"))


@pytest.mark.parametrize(
    ("changes", "cls", "sentence"),
    [
        ({"block_size": None}, ConfigError, "block_size"),
        ({"dflash_config": {"target_layer_ids": [1, 4, 6]}}, ConfigError, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4, 6], "block_size": 9}}, ConfigError, "block_size"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4]}}, ConfigError, "target_layer_ids"),
        ({"num_target_layers": 36}, ConfigError, "number of layers is 8"),
        ({"vocab_size": 1000}, ConfigError, "embedding rows is 512"),
        ({"rope_theta": None}, ConfigError, "rope_theta"),
        ({"tokenizer": "{}"}, InputError, "another tokenizer"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_before_the_target_runs(
    home: Path, changes: dict[str, Any], cls: type[EvalError], sentence: str
) -> None:
    with pytest.raises(cls, match=sentence) as caught:
        run(parameters(home, reference=edited_drafter(home, **changes)))
    assert type(caught.value) is cls
    assert caught.value.fix
    assert find_dirs(home, "references") == []


def test_a_prompt_longer_than_the_model_names_itself_and_both_lengths(home: Path) -> None:
    (home / "prompts.jsonl").write_text(json.dumps({"id": "long one", "prompt": "a b c " * 3000}) + "\n")
    with pytest.raises(InputError, match=r"Prompt long one has \d+ tokens; the target has room for 4072"):
        run(parameters(home))
