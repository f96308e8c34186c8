"""Trends: one training run, one ground, every checkpoint once."""

from pathlib import Path

from dflash_model.history import evaluations
from dflash_model.trend import training_runs, trend_of
from tests.made_up_evaluations import checkpoint_records, made_up_evaluation, publish_made_up, publish_step


def test_checkpoints_stand_by_step_and_the_best_has_the_highest_tau(tmp_path: Path) -> None:
    for night, step in enumerate((20, 30, 10), start=1):
        publish_step(tmp_path, f"night-{night}", step, night=night)
    found = evaluations(tmp_path)
    trend = trend_of(found, "train:/ckpt")
    assert trend is not None
    assert [point.drafter.step for point in trend.points] == [10, 20, 30]
    taus = [point.drafter.tau for point in trend.points]
    assert taus == sorted(taus, key=lambda tau: tau or 0)
    assert trend.best is not None
    assert (trend.best.drafter.step, trend.best.run_id) == (30, "night-2")
    assert trend.left_out == {}


def test_a_checkpoint_evaluated_twice_stands_once_as_it_was_last(tmp_path: Path) -> None:
    publish_step(tmp_path, "first", 20, night=1)
    publish_step(tmp_path, "second", 20, night=2)
    trend = trend_of(evaluations(tmp_path), "train:/ckpt")
    assert trend is not None
    assert [point.run_id for point in trend.points] == ["second"]


def test_other_ground_is_left_out_and_what_differs_is_said(tmp_path: Path) -> None:
    publish_step(tmp_path, "old-target", 10, night=1, target="e" * 64, references="9" * 64)
    publish_step(tmp_path, "old-tail", 10, night=2, tail="zlab", fidelity="WARN")
    publish_step(tmp_path, "longer", 10, night=3, references="8" * 64)
    publish_step(tmp_path, "now", 20, night=4)
    trend = trend_of(evaluations(tmp_path), "train:/ckpt")
    assert trend is not None
    assert [point.run_id for point in trend.points] == ["now"]
    assert trend.left_out == {
        "another target": 1,
        "tail rule zlab, not truncated, fidelity WARN, not PASS": 1,
        "other references (length limit or arithmetic)": 1,
    }


def test_training_runs_are_told_apart_by_host_and_directory(tmp_path: Path) -> None:
    for night, training in enumerate(("train:/a", "train:/b", "other:/a"), start=1):
        result = made_up_evaluation({"step": checkpoint_records(10)}, steps={"step": 10})
        publish_made_up(tmp_path, f"night-{night}", result, finished_at=f"2030-01-{night:02d}", training=training)
    found = evaluations(tmp_path)
    assert training_runs(found) == ["other:/a", "train:/b", "train:/a"]
    trend = trend_of(found, "train:/b")
    assert trend is not None
    assert [point.run_id for point in trend.points] == ["night-2"]
    assert trend_of(found, "train:/c") is None
