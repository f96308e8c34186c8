"""An engine's states against our own on one prompt, layer by layer: the gate sees the last layer only, this sees all.

The claim is that each stored layer is a certain tap. It holds where that tap is the nearest of all and near enough; where
it does not, what would explain the figures is named.

Shapes: N tokens, L stored layers, K = number of layers + 1 taps, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_model.errors import NotEvaluable
from dflash_model.target.layer_checks import LayerCheck, relative_l2

NAME = "engine states equal ours"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMatch:
    """One stored layer against all of ours."""

    claimed: int
    """The tap that it should be."""

    distance: float
    """Relative L2 distance to that tap."""

    nearest: int
    """The tap that it is nearest to."""

    nearest_distance: float
    """Relative L2 distance to it."""


def match_layers(states_NLH: torch.Tensor, taps: Sequence[int], ours: Sequence[torch.Tensor]) -> list[LayerMatch]:  # noqa: N803
    """Each stored layer [N, H] of `states_NLH`, claimed to be `taps`, against all K of `ours` [N, H]."""
    matches = []
    for layer, claimed in enumerate(taps):
        distances = [relative_l2(states_NLH[:, layer], own) for own in ours]
        nearest = min(range(len(ours)), key=distances.__getitem__)
        matches.append(
            LayerMatch(claimed=claimed, distance=distances[claimed], nearest=nearest, nearest_distance=distances[nearest])
        )
    return matches


def check_engine_states(
    states_NLH: torch.Tensor,  # noqa: N803 - shape suffix
    taps: Sequence[int],
    ours: Sequence[torch.Tensor],
    *,
    normed: torch.Tensor,
    tolerance: float,
    sample_id: str,
) -> LayerCheck:
    """The check, where it holds. `ours`: all K taps of the same tokens; `normed` [N, H]: our last one after the final norm.

    Raises NotEvaluable naming the layers that differ and what explains it.
    """
    matches = match_layers(states_NLH, taps, ours)
    wrong = [match for match in matches if match.distance > tolerance or match.nearest != match.claimed]
    farthest = max(matches, key=lambda match: match.distance)
    meaning = "The engine's states are not those of this target at these layers."
    if not wrong:
        detail = (
            f"{len(taps)} layers of sample {sample_id}, the farthest is tap {farthest.claimed}: "
            f"{farthest.distance:.2g}, tolerance {tolerance:.2g}"
        )
        return LayerCheck(name=NAME, passed=True, detail=detail, meaning=meaning)
    figures = ", ".join(
        f"tap {match.claimed} is {match.distance:.2g} away (nearest: tap {match.nearest}, {match.nearest_distance:.2g})"
        for match in wrong
    )
    raise NotEvaluable(
        f"The engine's states of {sample_id} are not ours (tolerance {tolerance:.2g}): {figures}.",
        f"Likely cause: {_explain(states_NLH, matches, ours, normed=normed, tolerance=tolerance)}",
    )


def _explain(
    states_NLH: torch.Tensor,  # noqa: N803 - shape suffix
    matches: Sequence[LayerMatch],
    ours: Sequence[torch.Tensor],
    *,
    normed: torch.Tensor,
    tolerance: float,
) -> str:
    near = all(match.nearest_distance <= tolerance for match in matches)
    offsets = {match.nearest - match.claimed for match in matches}
    found, claimed = [match.nearest for match in matches], [match.claimed for match in matches]
    if near and len(offsets) == 1:
        offset = offsets.pop()
        return (
            f"every layer is {abs(offset)} too {'low' if offset < 0 else 'high'}: the engine gave taps {found}, not {claimed}. "
            "vLLM's layer id is the tap index itself, a z-lab or SGLang id i is tap i + 1; start the engine with the other ids."
        )
    if near and sorted(found) == sorted(claimed):
        return f"the layers come in another order: {found}. Give the ids in the order in which the engine stores them."
    if near:
        return f"the engine gave taps {found}, not {claimed}. Give the ids that it was started with."
    last = len(ours) - 1
    if any(match.claimed == last and relative_l2(states_NLH[:, i], normed) <= tolerance for i, match in enumerate(matches)):
        return "the last layer has passed the final norm; raw rows are wanted."
    if len(states_NLH) > 1:
        for rows, own, sentence in (
            (slice(1, None), slice(None, -1), "late: row i holds the state after token i - 1"),
            (slice(None, -1), slice(1, None), "early: row i holds the state after token i + 1"),
        ):
            if all(relative_l2(states_NLH[rows, i], ours[m.claimed][own]) <= tolerance for i, m in enumerate(matches)):
                return f"each row is one place {sentence}."
    bad = [match.claimed for match in matches if match.nearest_distance > tolerance]
    return (
        f"taps {bad} are like none of ours, and neither order, offset, norm nor row shift explains it: another checkpoint "
        "or quantised weights, noise, states of several requests mixed, or a wrong kernel on one of the two sides."
    )
