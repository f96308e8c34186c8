"""tasks/remote/run_directories.py: a SpecForge run's pointer, its steps, and what is no such directory."""

import os
from pathlib import Path, PurePosixPath

import pytest
import torch

from dflash_model.errors import CheckpointError
from tasks.remote.drafters import discover
from tasks.remote.local import LocalHost
from tasks.remote.run_directories import checkpoint_name, checkpoints_in

OLD_NS = 10**18


@pytest.fixture
def host(tmp_path: Path) -> LocalHost:
    return LocalHost("train", tmp_path, threads=1, slots=1)


def save(run: Path, step: int, *, name: str = "r") -> Path:
    """A step as SpecForge leaves it; a later one has a later time."""
    path = run / f"{name}-step{step}" / "training_state.pt"
    path.parent.mkdir(parents=True)
    torch.save({"draft_state_dict": {"fc.weight": torch.full((8, 8), float(step))}, "global_step": step, "run_id": name}, path)
    os.utime(path, ns=(OLD_NS + step, OLD_NS + step))
    return path


def point(run: Path, step: int, *, name: str = "r") -> None:
    (run / f"{name}-latest").symlink_to(f"{name}-step{step}", target_is_directory=True)


def found(host: LocalHost, path: Path) -> list[str]:
    facts = host.stat(PurePosixPath(path))
    assert facts is not None
    return [str(one.path.relative_to(path)) for one in checkpoints_in(host, facts)]


def test_a_run_is_its_complete_steps_from_the_pointer_down(host: LocalHost, tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path / "run", step)
    assert found(host, tmp_path / "run") == [f"r-step{step}/training_state.pt" for step in (100, 10, 9)]
    point(tmp_path / "run", 10)  # step 100 is still being written: the pointer comes after
    assert found(host, tmp_path / "run") == ["r-step10/training_state.pt", "r-step9/training_state.pt"]


def test_a_step_is_its_state_whichever_way_it_is_named(host: LocalHost, tmp_path: Path) -> None:
    save(tmp_path / "run", 10)
    point(tmp_path / "run", 10)
    assert found(host, tmp_path / "run" / "r-step10") == ["training_state.pt"]
    assert found(host, tmp_path / "run" / "r-latest") == ["training_state.pt"]


def test_a_pointer_whose_step_is_elsewhere_is_followed(host: LocalHost, tmp_path: Path) -> None:
    save(tmp_path / "other", 7)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "r-latest").symlink_to(tmp_path / "other" / "r-step7", target_is_directory=True)
    assert found(host, tmp_path / "run") == ["r-latest/training_state.pt"]


def test_two_runs_in_one_directory_are_not_guessed_between(host: LocalHost, tmp_path: Path) -> None:
    save(tmp_path / "run", 1, name="a")
    save(tmp_path / "run", 2, name="b")
    with pytest.raises(CheckpointError, match=r"\[train\] .*/run holds several runs: a, b\."):
        found(host, tmp_path / "run")
    point(tmp_path / "run", 1, name="a")
    assert found(host, tmp_path / "run") == ["a-step1/training_state.pt"]


def test_anything_else_stands_for_itself(host: LocalHost, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert found(host, tmp_path / "empty") == ["."]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    save(tmp_path / "hf", 3)
    assert found(host, tmp_path / "hf") == ["."]


def test_discovery_takes_the_pointers_step_and_passes_over_one_that_is_cut(host: LocalHost, tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path / "run", step)
    point(tmp_path / "run", 10)
    drafter = discover(host, "run")
    assert (drafter.name, drafter.step, drafter.form) == ("r-step10", 10, "torch")
    cut = tmp_path / "run" / "r-step10" / "training_state.pt"
    cut.write_bytes(cut.read_bytes()[:-100])
    os.utime(cut, ns=(OLD_NS, OLD_NS))
    assert (discover(host, "run").name, discover(host, "run").step) == ("r-step9", 9)


def test_names_say_which_step(host: LocalHost) -> None:
    assert checkpoint_name(PurePosixPath("/a/r-step10/training_state.pt")) == "r-step10"
    assert checkpoint_name(PurePosixPath("/a/step-10.pt")) == "step-10"
