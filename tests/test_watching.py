"""Watching a training run: each complete checkpoint once, in order, through restarts, refusals and hosts that are down."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_model.errors import Cancelled, CheckpointError, HostError, InputError, Regressed, StorageError
from flows.parameters import DrafterSource, EvaluateParameters, TargetSource
from flows.watching import book_of, keep_looking, look_once
from tasks.remote.local import LocalHost
from tasks.remote.watching import REFUSED, WatchBook, new_checkpoints

OLD_NS = 10**18


def save(directory: Path, step: int, *, value: float | None = None, name: str | None = None) -> Path:
    """A small training file, saved long ago, the later steps earlier: the clock must not decide the order."""
    path = directory / (name or f"step-{step}.pt")
    weights = torch.full((4, 4), float(step) if value is None else value)
    torch.save({"model_state_dict": {"fc.weight": weights}, "step": step}, path)
    os.utime(path, ns=(OLD_NS - step, OLD_NS - step))
    return path


def parameters(tmp_path: Path, **changes: Any) -> EvaluateParameters:
    values = {
        "home": str(tmp_path / "home"), "candidates": [DrafterSource(path=str(tmp_path / "step-*.pt"))],
        "target": TargetSource(path="/target"), "prompts": "/prompts.jsonl",
    }  # fmt: skip
    return EvaluateParameters(**(values | changes))


class Evaluations:
    """Stands for the evaluation: remembers what it was given; `fails` maps a step's name to what it raises, once."""

    def __init__(self, **fails: Exception) -> None:
        self.names: list[str] = []
        self.fails = fails

    def __call__(self, given: EvaluateParameters) -> dict[str, Any]:
        (candidate,) = given.candidates
        assert candidate.name is not None
        assert given.run_id is None
        assert Path(candidate.path).is_file()
        failure = self.fails.pop(candidate.name.replace("-", "_"), None)
        if failure is not None:
            raise failure
        self.names.append(candidate.name)
        return {"run_id": f"run-of-{candidate.name}"}


def look(given: EvaluateParameters, evaluations: Evaluations, said: list[str] | None = None) -> list[str]:
    heard = [] if said is None else said
    return look_once(given, evaluate=evaluations, say=heard.append, settle_s=0.05)


def test_each_complete_checkpoint_is_evaluated_once_and_in_the_order_of_training(tmp_path: Path) -> None:
    evaluations = Evaluations()
    for step in (100, 20, 3):
        save(tmp_path, step)
    assert look(parameters(tmp_path), evaluations) == ["step-3", "step-20", "step-100"]
    assert look(parameters(tmp_path), evaluations) == []
    save(tmp_path, 200)
    assert look(parameters(tmp_path), evaluations) == ["step-200"]
    assert evaluations.names == ["step-3", "step-20", "step-100", "step-200"]
    other_prompts = parameters(tmp_path, prompts="/other.jsonl")
    assert len(look(other_prompts, evaluations)) == 4, "other prompts are another watch"


def test_what_is_not_complete_yet_is_taken_when_it_is(tmp_path: Path) -> None:
    evaluations = Evaluations()
    save(tmp_path, 1)
    whole = save(tmp_path, 2).read_bytes()
    (tmp_path / "step-2.pt").write_bytes(whole[: len(whole) // 2])
    assert look(parameters(tmp_path), evaluations) == ["step-1"]
    (tmp_path / "step-2.pt").write_bytes(whole)
    os.utime(tmp_path / "step-2.pt", ns=(OLD_NS, OLD_NS))
    assert look(parameters(tmp_path), evaluations) == ["step-2"]


def test_the_same_content_under_another_name_is_not_evaluated_again_and_an_overwritten_file_is(tmp_path: Path) -> None:
    evaluations = Evaluations()
    save(tmp_path, 1)
    look(parameters(tmp_path), evaluations)
    save(tmp_path, 1, name="step-latest.pt")
    assert look(parameters(tmp_path), evaluations) == []
    assert look(parameters(tmp_path), evaluations) == []
    overwritten = save(tmp_path, 1, value=9.0)
    os.utime(overwritten, ns=(OLD_NS + 5, OLD_NS + 5))
    assert look(parameters(tmp_path), evaluations) == ["step-1"]


def test_a_refused_checkpoint_is_noted_and_the_next_is_taken(tmp_path: Path) -> None:
    evaluations = Evaluations(step_1=CheckpointError("no drafter."))
    save(tmp_path, 1)
    save(tmp_path, 2)
    said: list[str] = []
    assert look(parameters(tmp_path), evaluations, said) == ["step-2"]
    assert "step-1: refused. no drafter." in said
    assert look(parameters(tmp_path), evaluations) == []
    entries = book_of(parameters(tmp_path)).entries
    assert [(entry.name, entry.outcome, entry.detail) for entry in entries] == [
        ("step-1", REFUSED, "no drafter."),
        ("step-2", "evaluated", "run-of-step-2"),
    ]


def test_a_checkpoint_that_the_gate_fails_was_evaluated_all_the_same(tmp_path: Path) -> None:
    evaluations = Evaluations(step_1=Regressed("worse than the reference."))
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert look(parameters(tmp_path), evaluations) == ["step-1", "step-2"]
    assert [entry.outcome for entry in book_of(parameters(tmp_path)).entries] == ["evaluated", "evaluated"]


@pytest.mark.parametrize("failure", [Cancelled("Interrupted."), KeyboardInterrupt(), InputError("wrong prompts.")])
def test_interrupted_in_the_middle_it_does_that_one_again_and_no_other(tmp_path: Path, failure: BaseException) -> None:
    evaluations = Evaluations(step_2=failure)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        save(tmp_path, step)
    with pytest.raises(type(failure)):
        keep_looking(parameters(tmp_path), evaluate=evaluations, say=lambda text: None, every_s=0.01)
    assert evaluations.names == ["step-1"]
    look(parameters(tmp_path), evaluations)
    assert evaluations.names == ["step-1", "step-2", "step-3"]


def test_a_host_that_is_down_is_said_and_tried_again(tmp_path: Path) -> None:
    evaluations = Evaluations(step_1=HostError("[gpu] is down."))
    save(tmp_path, 1)
    said: list[str] = []
    keep_looking(parameters(tmp_path), evaluate=evaluations, say=said.append, every_s=0.01, looks=2)
    assert evaluations.names == ["step-1"]
    assert "[gpu] is down. Tried again at the next look." in said


def test_several_candidates_are_no_watch(tmp_path: Path) -> None:
    both = [DrafterSource(path="/a"), DrafterSource(path="/b")]
    with pytest.raises(InputError, match="follows one candidate, not 2"):
        look(parameters(tmp_path, candidates=both), Evaluations())


def test_a_foreign_book_is_refused_and_a_known_file_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "book.json").write_text('{"book_version": 2, "entries": []}')
    with pytest.raises(StorageError, match="no watch book of version 1"):
        WatchBook(tmp_path / "book.json")
    save(tmp_path, 1)
    host = LocalHost("train", tmp_path, threads=1, slots=1)
    (sighting,) = new_checkpoints(host, str(tmp_path / "step-*.pt"), known=(), settle_s=0.0)
    monkeypatch.setattr(LocalHost, "open_source", lambda self, path: pytest.fail("a known file was opened"))
    assert new_checkpoints(host, str(tmp_path / "step-*.pt"), known={sighting.mark}, settle_s=0.0) == []
