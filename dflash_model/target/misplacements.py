"""Known ways in which rows end up in the wrong place or the wrong form, and how each shows.

Nothing here decides a verdict; it gives the gate's FAIL a name.

Shapes: N tokens of a sample, n its completion tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dflash_model.target.references import Reference
from dflash_model.target.tables import ONE_PLUS, PLAIN, Tables
from dflash_model.target.token_scores import score_rows

SHIFTED_LATER = "rows_shifted_later"
SHIFTED_EARLIER = "rows_shifted_earlier"
NORM_TWICE = "norm_applied_twice"
NORM_OMITTED = "norm_omitted"
NORM_FORM = "other_norm_form"
OTHER_SAMPLE = "rows_of_another_sample"
TEMPLATE = "other_prompt_template"
COMPUTED_AGAIN = "rows_not_of_these_tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """What one sample would measure under one misplacement."""

    agreeing: int
    """Tokens that would agree."""

    delta_sum_nats: float | None
    """Sum of |log-probability - the recorded one|; None where none was recorded."""


def norm_faults(final: torch.Tensor, reference: Reference, *, tables: Tables, normed: bool) -> dict[str, str]:
    """Whether the rows passed the final norm, read from the rows themselves.

    Divided by the norm's weight, a normed row has RMS 1 and a raw one has not. Argmax hardly moves where the norm's
    weight is nearly uniform, so agreement alone may miss a norm applied twice.
    """
    weight = tables.norm.float().cpu() + (1.0 if tables.norm_form == ONE_PLUS else 0.0)
    if bool((weight.abs() < 1e-3).any()):
        return {}
    rms = (final.float() / weight).pow(2).mean(dim=1).sqrt()
    looks_normed = bool(((rms - 1).abs() < 0.02).all())
    if looks_normed and not normed:
        return {NORM_TWICE: f"The states of {reference.sample_id} should be raw, but each row has passed the final norm."}
    if normed and not looks_normed:
        return {NORM_OMITTED: f"The states of {reference.sample_id} should have passed the final norm, but they are raw."}
    return {}


def try_misplacements(final: torch.Tensor, reference: Reference, *, tables: Tables, normed: bool) -> dict[str, Alternative]:
    """What would be measured if the rows were misplaced or normed in each of the known ways."""
    first, n = len(reference.prompt_ids), len(reference.completion_ids)
    other_form = replace(tables, norm_form=PLAIN if tables.norm_form == ONE_PLUS else ONE_PLUS)
    tries = {
        # name: (row that predicts the first completion token, tables, whether the rows are normed)
        SHIFTED_LATER: (first, tables, normed),
        SHIFTED_EARLIER: (first - 2, tables, normed),
        NORM_OMITTED if normed else NORM_TWICE: (first - 1, tables, not normed),
        NORM_FORM: (first - 1, other_form, False),
    }
    found = {}
    for name, (row, used, rows_normed) in tries.items():
        skipped = max(0, -row)
        rows = final[row + skipped : row + n]
        if not len(rows):
            continue
        part = slice(skipped, skipped + len(rows))
        recorded = None if reference.logprobs is None else reference.logprobs[part]
        found[name] = alternative_of(rows, reference.completion_ids[part], recorded, used, normed=rows_normed)
    return found


def alternative_of(
    rows: torch.Tensor, targets: Sequence[int], recorded: Sequence[float] | None, tables: Tables, *, normed: bool
) -> Alternative:
    """What rows [n, H] measure against `targets` and their recorded log-probabilities."""
    score = score_rows(rows, targets, tables, normed=normed)
    delta = None if recorded is None else float((score.true - torch.tensor(recorded)).abs().double().sum())
    return Alternative(agreeing=int(score.agree.sum()), delta_sum_nats=delta)


def find_owner(
    final: torch.Tensor,
    reference: Reference,
    *,
    tables: Tables,
    normed: bool,
    others: Mapping[str, Reference] | None,
    above: float,
) -> str | None:
    """The other sample of as many tokens as there are rows whose completion these rows predict, nearly all of it.

    It must do so clearly better than for the sample itself (share `above`): answers to like prompts are alike.
    """
    if final.ndim != 2 or not bool(torch.isfinite(final).all()):
        return None
    best, owner = max(0.9, above + 0.2), None
    for other in (others or {}).values():
        if other.sample_id == reference.sample_id or len(other.token_ids) != len(final):
            continue
        share = float(
            score_rows(final[len(other.prompt_ids) - 1 : -1], other.completion_ids, tables, normed=normed).agree.float().mean()
        )
        if share >= best:
            best, owner = share, other.sample_id
    return owner
