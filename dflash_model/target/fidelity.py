"""The fidelity gate: do these hidden states lead the target's own head to the reference's own tokens?

Per completion token y_t the row before it gives logits: agree = (argmax == y_t), gap = best log-probability minus that of
y_t (0 where they agree), in nats. Near ties flip between correct programs, so agreement below 1 with small gaps is
normal; large gaps are not. The gate sees the last layer only: `layer_checks.py` covers what logits cannot show, and a
verdict needs both.

Shapes: N tokens of a sample, n its completion tokens, H hidden size, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any

import torch

from dflash_model.errors import ConfigError
from dflash_model.target.misplacements import Alternative, find_owner, norm_faults, try_misplacements
from dflash_model.target.references import Reference
from dflash_model.target.tables import Tables
from dflash_model.target.token_scores import score_rows

TOKENS = "other_tokens"
ROWS = "row_count"
NON_FINITE = "non_finite"
ZERO_ROWS = "zero_rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Where the gate draws its lines.

    Measured on a trained hybrid target: correct paths (fp32, bf16, chunked or recurrent, with or without padding) agree
    on >= .990 of tokens with gaps <= .07 nat; wrong ones (a layer zeroed, no decay, no q/k norm) on <= .59 with gaps
    >= 4.2; a norm applied twice or omitted on .74-.78. The lines lie between, nearer to the correct side.
    """

    pass_agree: float = 0.97
    """PASS needs at least this share of tokens to agree: correct paths miss .01 or less, a server's kernels a little more."""

    fail_agree: float = 0.90
    """FAIL below it: no correct path came near."""

    hard_gap_nats: float = 0.5
    """A disagreement by more is no tie: seven times the largest gap of a correct path, an eighth of a wrong one's."""

    pass_hard_rate: float = 0.002
    """PASS allows this share of hard disagreements: one in 500 tokens."""

    fail_hard_rate: float = 0.02
    """FAIL above it."""

    sample_tokens: int = 16
    """A sample of at least so many completion tokens may FAIL the gate on its own (one swapped sample among many)."""

    sample_agree: float = 0.75
    """... where it agrees on less than this, and its hard rate is above `fail_hard_rate`."""

    few_tokens: int = 200
    """Below so many pooled tokens a handful of misses decides: the verdict is at best WARN, and says so."""

    fail_delta_median_nats: float = 0.5
    """FAIL above: half of the log-probabilities are far off, so the distribution is another one (a norm in the wrong form), even
    if the best token survives. Servers that report 0 for every greedy token stay well below it."""

    delta_median_nats: float = 0.02
    """WARN above: half of the reference's log-probabilities differ from ours by more than rounding explains (a guess)."""

    delta_p99_nats: float = 0.5
    """WARN above, likewise for the worst hundredth (a guess)."""

    check_l2_float32: float = 1e-4
    """The exact checks FAIL above this relative L2 difference in float32: five times the largest of a correct pair of paths."""

    check_l2_bfloat16: float = 2e-2
    """... and in bfloat16: correct paths were up to 1.6e-2 apart, a dropped recurrent state is several times that."""

    engine_l2_float32: float = 1e-3
    """An engine's layer is another one above this relative L2 distance to ours, where both are float32."""

    engine_l2_bfloat16: float = 5e-2
    """... and where one is bfloat16: rounding alone puts correct paths up to 1.7e-2 apart over 8 layers and grows with depth;
    noise of a tenth of a layer's size is 1e-1, and neighbouring layers are farther still."""

    @classmethod
    def from_json(cls, changes: Mapping[str, Any]) -> Thresholds:
        """The default lines with some of them moved. Raises ConfigError for an unknown one or a value that is no number."""
        known = {line.name for line in fields(cls)}
        for name, value in changes.items():
            if name not in known or isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(
                    f"The fidelity threshold {name} = {value!r} is not known or no number >= 0.",
                    f"Lines that can be moved: {', '.join(sorted(known))}.",
                )
        return replace(cls(), **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFidelity:
    """What the gate measured on one sample; None where nothing could be measured."""

    sample_id: str
    """The prompt's id."""

    n: int
    """Completion tokens compared; 0 where a fault prevented it."""

    faults: dict[str, str] = field(default_factory=dict)
    """Kind -> sentence: token or row-count mismatch, non-finite values, all-zero rows, norm state. Any of them fails the gate."""

    agreeing: int = 0
    """Tokens whose argmax is the reference's."""

    hard: int = 0
    """Tokens whose gap is above the hard gap."""

    max_gap_nats: float | None = None
    """Largest gap."""

    nll_sum_nats: float = 0.0
    """Sum of the reference's negative log-probability under these states."""

    first_hard_position: int | None = None
    """Position (in prompt + completion) of the first hard disagreement, or None."""

    gaps_nats: tuple[float, ...] = ()
    """Gap of each completion token; 0 exactly where it agrees."""

    logprobs: tuple[float, ...] = ()
    """Our log-probability of each completion token."""

    deltas_nats: tuple[float, ...] | None = None
    """|our log-probability - the reference's recorded one| of each completion token; None where none was recorded."""

    alternatives: dict[str, Alternative] = field(default_factory=dict)
    """Misplacement -> what it would give; tried only where the sample looks wrong."""

    resembles: str | None = None
    """The other sample whose tokens these rows predict, where one does."""

    @property
    def agree(self) -> float | None:
        """Share of agreeing tokens."""
        return self.agreeing / self.n if self.n else None

    @property
    def hard_rate(self) -> float | None:
        """Share of hard disagreements."""
        return self.hard / self.n if self.n else None

    def to_json(self) -> dict[str, Any]:
        """A JSON value that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SampleFidelity:
        """Read `to_json`'s value."""
        deltas = data["deltas_nats"]
        alternatives = {name: Alternative(**value) for name, value in data["alternatives"].items()}
        lists = {"gaps_nats": tuple(data["gaps_nats"]), "logprobs": tuple(data["logprobs"])}
        return cls(**(data | lists | {"alternatives": alternatives, "deltas_nats": None if deltas is None else tuple(deltas)}))


def measure(
    final: torch.Tensor,
    token_ids: Sequence[int],
    *,
    reference: Reference,
    tables: Tables,
    thresholds: Thresholds,
    normed: bool = False,
    others: Mapping[str, Reference] | None = None,
) -> SampleFidelity:
    """Compare one sample's last-layer rows `final` [N, H], fed with `token_ids`, with its reference.

    `normed` says that the rows passed the final norm already (some servers return them so). `others` are the run's
    references; where the sample looks wrong, those of the same length are tried as the rows' true owner.
    """
    faults = _structural_faults(final, token_ids, reference)
    if faults:
        owner = find_owner(final, reference, tables=tables, normed=normed, others=others, above=0.0)
        return SampleFidelity(sample_id=reference.sample_id, n=0, faults=faults, resembles=owner)
    faults |= norm_faults(final, reference, tables=tables, normed=normed)
    first, n = len(reference.prompt_ids), len(reference.completion_ids)
    score = score_rows(final[first - 1 : first - 1 + n], reference.completion_ids, tables, normed=normed)
    if not bool(torch.isfinite(score.true).all()):
        faults[NON_FINITE] = f"The states of {reference.sample_id} lead to NaN or infinite logits."
        return SampleFidelity(sample_id=reference.sample_id, n=0, faults=faults)
    # Rounded, so that the same figures come from the kept lists; a disagreement stays one.
    gaps = [0.0 if agrees else max(1e-6, round(gap, 6)) for agrees, gap in zip(score.agree, score.gaps().tolist(), strict=True)]
    logprobs = [round(value, 6) for value in score.true.tolist()]
    sample = assess(
        SampleFidelity(sample_id=reference.sample_id, n=n, faults=faults, gaps_nats=tuple(gaps), logprobs=tuple(logprobs)),
        reference,
        thresholds,
    )
    owner = None
    if sample.agreeing < thresholds.sample_agree * n:
        owner = find_owner(final, reference, tables=tables, normed=normed, others=others, above=sample.agreeing / n)
    suspect = is_suspect(sample, thresholds)
    alternatives = try_misplacements(final, reference, tables=tables, normed=normed) if suspect else {}
    return replace(sample, alternatives=alternatives, resembles=owner)


def not_delivered(reference: Reference) -> SampleFidelity:
    """A sample whose last layer nobody has: nothing was measured."""
    return SampleFidelity(sample_id=reference.sample_id, n=0)


def assess(sample: SampleFidelity, reference: Reference, thresholds: Thresholds) -> SampleFidelity:
    """The figures that `thresholds` and the reference's recorded log-probabilities give for a sample's kept lists."""
    if not sample.n:
        return replace(sample, sample_id=reference.sample_id)
    gaps, first = sample.gaps_nats, len(reference.prompt_ids)
    hard = [place for place, gap in enumerate(gaps) if gap > thresholds.hard_gap_nats]
    deltas = None
    if reference.logprobs is not None:
        deltas = tuple(round(abs(ours - theirs), 6) for ours, theirs in zip(sample.logprobs, reference.logprobs, strict=True))
    return replace(
        sample,
        sample_id=reference.sample_id,
        agreeing=sum(gap == 0 for gap in gaps),
        hard=len(hard),
        max_gap_nats=max(gaps),
        nll_sum_nats=-sum(sample.logprobs),
        first_hard_position=first + hard[0] if hard else None,
        deltas_nats=deltas,
    )


def is_suspect(sample: SampleFidelity, thresholds: Thresholds) -> bool:
    """Whether it is worth finding out what went wrong with a sample."""
    low = sample.agreeing < thresholds.pass_agree * sample.n or sample.hard > thresholds.fail_hard_rate * sample.n
    far = bool(sample.deltas_nats) and median(sample.deltas_nats or ()) > thresholds.delta_median_nats
    return bool(sample.faults) or low or far


def _structural_faults(final: torch.Tensor, token_ids: Sequence[int], reference: Reference) -> dict[str, str]:
    faults = {}
    if tuple(token_ids) != reference.token_ids:
        faults[TOKENS] = f"The states of {reference.sample_id} were made from other tokens than its reference holds."
    if final.ndim != 2 or final.shape[0] != len(reference.token_ids):
        shape = tuple(final.shape)
        faults[ROWS] = f"{reference.sample_id} has states of shape {shape} for {len(reference.token_ids)} tokens."
    elif not bool(torch.isfinite(final).all()):
        bad = int((~torch.isfinite(final).all(dim=1)).nonzero()[0])
        faults[NON_FINITE] = f"The states of {reference.sample_id} hold NaN or infinite values, first in row {bad}."
    else:
        zero = (~final.any(dim=1)).nonzero()
        if len(zero):
            faults[ZERO_ROWS] = f"The states of {reference.sample_id} hold {len(zero)} all-zero rows, first row {int(zero[0])}."
    return faults
