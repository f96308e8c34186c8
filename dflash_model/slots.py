"""Per-slot acceptance over the visited chain anchors, and at which slot two drafters part.

Slot i (from 1) drafts the token at anchor + i. At the end of a request a slot may lie past the last known token: such a
slot is *not observed*, which is neither accepted nor refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_model.metrics import complete_walk
from dflash_model.replay.records import UNKNOWN, SampleRecords
from dflash_model.replay.walk import TRUNCATED, chain_matched, counts_in_full

Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotRates:
    """What happened at one slot of the visited blocks."""

    slot: int
    """1..D."""

    reached: int
    """Steps whose slots before this one were all accepted and in which this slot was observed."""

    accepted: int
    """Those of `reached` in which this slot was accepted too."""

    observed: int
    """Visited blocks in which this slot was observed, whatever came before it."""

    correct: int
    """Those of `observed` whose drafted token was the true one."""

    survival: float | None
    """P(accepted drafts >= slot); None where no step could tell."""

    @property
    def conditional(self) -> float | None:
        """P(this slot accepted | all before it were); None where no step reached it."""
        return self.accepted / self.reached if self.reached else None

    @property
    def accuracy(self) -> float | None:
        """Marginal accuracy under teacher forcing: how often the slot's own token was right, the others aside."""
        return self.correct / self.observed if self.observed else None


def slot_rates(samples: Iterable[SampleRecords], *, tail: str = TRUNCATED) -> list[SlotRates]:
    """One entry a slot, over the chain's own steps. Raises StageError for missing anchors.

    Observed means: inside the completion where a last step is cut (what a serving engine sees), a known token where it counts
    in full.
    Survival treats the end of a request as censoring (Kaplan and Meier): survival_i is the product of the conditional
    rates up to i, each over the steps that reached slot i and observed it. A cut step therefore counts in full up to its
    cut and not at all past it, survival never rises with i, and without cut steps it is the plain share of steps.
    Under `truncated`, 1 + sum of survival is thus what uncut steps would earn: a little above the pooled tau.
    """
    blocks = [_visited(records, tail) for records in samples]
    blocks = [block for block in blocks if len(block[0])]
    if not blocks:
        return []
    right = np.concatenate([block[0] for block in blocks])
    observed = np.concatenate([block[1] for block in blocks])
    before = np.concatenate([np.ones((len(right), 1), dtype=bool), np.logical_and.accumulate(right, axis=1)[:, :-1]], axis=1)
    reached = before & observed
    rates: list[SlotRates] = []
    survival: float | None = 1.0
    for index in range(right.shape[1]):
        at_slot, accepted = int(reached[:, index].sum()), int((reached & right)[:, index].sum())
        survival = _next_survival(survival, at_slot, accepted)
        rates.append(
            SlotRates(
                slot=index + 1,
                reached=at_slot,
                accepted=accepted,
                observed=int(observed[:, index].sum()),
                correct=int((right & observed)[:, index].sum()),
                survival=survival,
            )
        )
    return rates


def _visited(records: SampleRecords, tail: str) -> tuple[Bool, Bool]:
    """(right, observed), each [steps, D], at the anchors that the chain visits."""
    anchors = np.array(complete_walk(records, chain_matched, tail=tail).anchors, dtype=np.int64)
    ranks = records.true_rank[np.searchsorted(records.anchors, anchors)]
    observed = ranks != UNKNOWN
    if not counts_in_full(records.sequence, tail):
        positions = anchors[:, None] + np.arange(1, ranks.shape[1] + 1)
        observed &= positions < records.sequence.end
    return (ranks == 0) & observed, observed


def _next_survival(survival: float | None, reached: int, accepted: int) -> float | None:
    if survival == 0:
        return 0.0
    return survival * accepted / reached if survival is not None and reached else None


def slot_effects(candidate: Sequence[SlotRates], reference: Sequence[SlotRates]) -> list[float | None]:
    """Tokens per step gained (or lost) at each common slot if the reference had the candidate's conditional rate there alone.

    The largest entry is where two drafters part: a loss at slot 1 costs every later slot too. None where either
    drafter's rate is not known. Entries need not sum to the difference of the taus.
    """
    common = min(len(candidate), len(reference))
    rates = [slot.conditional for slot in reference]
    base = _expected_tokens(rates)
    effects: list[float | None] = []
    for index in range(common):
        swapped = candidate[index].conditional
        if swapped is None or rates[index] is None:
            effects.append(None)
            continue
        effects.append(_expected_tokens([*rates[:index], swapped, *rates[index + 1 :]]) - base)
    return effects


def _expected_tokens(conditionals: Sequence[float | None]) -> float:
    """1 + sum of survival, up to the first unknown rate."""
    expected, survival = 1.0, 1.0
    for rate in conditionals:
        if rate is None:
            break
        survival *= rate
        expected += survival
    return expected
