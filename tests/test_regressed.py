"""A red night in the real flow: published, told, and in the failed state Regressed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dflash_model.errors import InputError, Regressed
from flows.parameters import DrafterSource, EvaluateParameters, Gate, Notify, References, TargetSource
from tasks import notify
from tests.webhook_receiver import SECRET, receiving

pytestmark = pytest.mark.engine
DEMO = Path(__file__).resolve().parent.parent / "deployments" / "demo"


@pytest.fixture
def given(tmp_path: Path, prefect_api: None, monkeypatch: pytest.MonkeyPatch) -> EvaluateParameters:
    monkeypatch.setattr(notify, "BACKOFF_S", 0.01)
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[:: len(lines) // 10][:10]) + "\n")
    return EvaluateParameters(
        home=str(tmp_path / "home"),
        candidates=[DrafterSource(path=str(DEMO / "drafters" / "step-00055"))],
        reference=DrafterSource(path=str(DEMO / "drafters" / "step-00220")),
        target=TargetSource(path=str(DEMO / "target")),
        prompts=str(tmp_path / "prompts.jsonl"),
        references=References(max_new_tokens=24, overshoot_tokens=0),
        notify=Notify(link="https://runs.example"),
    )


def run(parameters: EvaluateParameters) -> tuple[Any, Path]:
    """(final state, the run's directory)"""
    from flows.evaluate import evaluate, place_of

    named = parameters.model_copy(update={"run_id": place_of(parameters).run_id})
    state = evaluate(named, return_state=True)
    return state, Path(str(parameters.home)) / "runs" / str(named.run_id)


def no_secret_below(directory: Path) -> None:
    for root, _, names in os.walk(directory):
        for name in names:
            assert SECRET.encode() not in (Path(root) / name).read_bytes(), f"{root}/{name}"


def test_green_then_red_by_each_rule_then_failed(given: EvaluateParameters, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving(500, 500, 200) as receiver:
        monkeypatch.setenv(notify.WEBHOOK_VARIABLE, receiver.url)
        state, directory = run(given)
        assert state.is_completed()
        result = json.loads((directory / "result.json").read_text())
        assert len(receiver.messages) == 3
        assert receiver.messages[-1]["text"] == result["headline"]
        assert f"https://runs.example/{directory.name}/report.html" in receiver.text
        assert f"tau {result['drafters'][1]['tau']['pooled']:.2f}" in receiver.text

        state, red = run(given.model_copy(update={"gate": Gate(worse_than_reference=0.05, worse_than_best=0.0)}))
        assert (state.type.value, state.name) == ("FAILED", "Regressed")
        with pytest.raises(Regressed, match="worse than step-00220 by"):
            state.result()
        assert receiver.messages[-1]["text"].startswith("Regressed: step-00055 is worse than step-00220 by ")
        assert (red / "result.json").read_bytes() == (directory / "result.json").read_bytes()
        assert (red / "report.html").is_file()
        gate = json.loads((red / "run.json").read_text())["gate"]
        assert len(gate["regressed"]) == 1
        # The only other evaluation is of this very checkpoint, which cannot be worse than itself.
        assert gate["not_applied"] == ["There is no earlier checkpoint of step-00055's training run to hold it against."]

        better = given.model_copy(update={"candidates": [DrafterSource(path=str(DEMO / "drafters" / "step-00110"))]})
        assert run(better)[0].is_completed()
        state, _ = run(given.model_copy(update={"gate": Gate(worse_than_best=0.05), "reference": None}))
        assert state.name == "Regressed"
        assert "step-00055 is worse than step-00110 of " in state.message

        told = len(receiver.messages)
        missing = given.model_copy(update={"prompts": str(directory / "none.jsonl"), "notify": Notify(on="trouble")})
        state, failed = run(missing)
        assert state.is_failed()
        with pytest.raises(InputError):
            state.result()
        assert len(receiver.messages) == told + 1
        assert "failed" in receiver.messages[-1]["text"]
        assert f"dflash-eval rerun {failed.name}" in receiver.text

        run(given.model_copy(update={"notify": Notify(on="trouble")}))
        run(given.model_copy(update={"notify": Notify(on="never"), "gate": Gate(min_tau=100.0)}))
        assert len(receiver.messages) == told + 1
    no_secret_below(Path(str(given.home)))
