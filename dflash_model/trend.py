"""The trend of a training run: its checkpoints by step, each as it was last evaluated on the newest ground.

Only evaluations on one ground make a trend; the others are counted with what differs, never mixed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dflash_model.evaluations import EvaluatedDrafter, Evaluation, Ground


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One checkpoint in a trend."""

    run_id: str
    """The evaluation that it is taken from."""

    drafter: EvaluatedDrafter
    """Its numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """The checkpoints of one training run."""

    training_run: str
    """host:directory of the checkpoints."""

    ground: Ground
    """Of every point."""

    points: tuple[Point, ...]
    """By step; checkpoints that do not say their step come first, in the order of their evaluation."""

    left_out: dict[str, int]
    """What differs ("another target, ...") -> how many evaluations of this training run stand on such ground."""

    @property
    def best(self) -> Point | None:
        """The point with the highest pooled tau, the earlier step where two are equal; None where no point has a tau."""
        measured = [point for point in self.points if point.drafter.tau is not None]
        return max(measured, key=lambda point: point.drafter.tau or 0.0, default=None)


def training_runs(evaluations: Sequence[Evaluation]) -> list[str]:
    """Training runs with a candidate in `evaluations` (oldest first), that of the newest evaluation first."""
    seen: dict[str, None] = {}
    for one in reversed(evaluations):
        for drafter in one.drafters:
            if drafter.role == "candidate" and drafter.training_run is not None:
                seen.setdefault(drafter.training_run)
    return list(seen)


def trend_of(evaluations: Sequence[Evaluation], training_run: str, *, ground: Ground | None = None) -> Trend | None:
    """The trend of `training_run` on `ground` (None: that of its newest evaluation); None where it was never evaluated.

    A checkpoint evaluated several times stands once, as it was last evaluated.
    """
    members = [
        (one, drafter)
        for one in evaluations
        for drafter in one.drafters
        if drafter.role == "candidate" and drafter.training_run == training_run
    ]
    if not members and ground is None:
        return None
    ground = ground or members[-1][0].ground
    last: dict[str, Point] = {}
    others: Counter[str] = Counter()
    for one, drafter in members:
        differences = ground.differences(one.ground)
        if differences:
            others[", ".join(differences)] += 1
        else:
            last.pop(drafter.digest, None)
            last[drafter.digest] = Point(run_id=one.run_id, drafter=drafter)
    points = sorted(last.values(), key=lambda point: -1 if point.drafter.step is None else point.drafter.step)
    return Trend(training_run=training_run, ground=ground, points=tuple(points), left_out=dict(others))
