"""Each known misplacement is found when it is there, by hand-made rows on an identity head."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_model.target.misplacements import (
    NORM_FORM,
    NORM_OMITTED,
    NORM_TWICE,
    SHIFTED_EARLIER,
    SHIFTED_LATER,
    find_owner,
    norm_faults,
    try_misplacements,
)
from dflash_model.target.references import Reference
from dflash_model.target.tables import ONE_PLUS, PLAIN, Tables

VOCABULARY = 8
REFERENCE = Reference(
    sample_id="a",
    prompt_ids=(1, 2),
    completion_ids=(3, 4, 5),
    overshoot_ids=(),
    finish="length",
    logprobs=(-0.5, -0.5, -0.5),
    engine="x",
)


def _tables(norm: torch.Tensor | None = None, norm_form: str = PLAIN) -> Tables:
    eye = torch.eye(VOCABULARY)
    return Tables(
        embed=eye, head=eye, norm=torch.ones(VOCABULARY) if norm is None else norm, norm_form=norm_form, rms_norm_eps=0.0,
        embedding_scale=1.0, logit_softcap=None, tied=True, facts={},
    )  # fmt: skip


def _rows(*predicted: int) -> torch.Tensor:
    """Rows that predict the given tokens: one at the token's place, a little noise elsewhere."""
    rows = torch.full((len(predicted), VOCABULARY), 0.01)
    for row, token in enumerate(predicted):
        rows[row, token] = 3.0
    return rows


@pytest.mark.parametrize(
    ("rows", "agreeing"),
    [
        # Tokens are 1 2 3 4 5: a right row i predicts token i + 1, that is 2 3 4 5 and anything after the end.
        (_rows(2, 3, 4, 5, 7), {SHIFTED_LATER: 0, SHIFTED_EARLIER: 0, NORM_TWICE: 3, NORM_FORM: 3}),
        (_rows(0, 2, 3, 4, 5), {SHIFTED_LATER: 3, SHIFTED_EARLIER: 0, NORM_TWICE: 0, NORM_FORM: 0}),
        (_rows(3, 4, 5, 7, 7), {SHIFTED_LATER: 0, SHIFTED_EARLIER: 3, NORM_TWICE: 0, NORM_FORM: 0}),
    ],
    ids=["right", "late", "early"],
)
def test_shifted_rows_agree_under_their_own_shift_only(rows: torch.Tensor, agreeing: dict[str, int]) -> None:
    found = try_misplacements(rows, REFERENCE, tables=_tables(), normed=False)
    assert {name: alternative.agreeing for name, alternative in found.items()} == agreeing


def test_a_one_token_prompt_has_no_row_before_its_first() -> None:
    """The early shift needs row -1 for the first completion token; it is left out, not wrapped round."""
    reference = replace(REFERENCE, prompt_ids=(2,), completion_ids=(3, 4, 5))
    found = try_misplacements(_rows(4, 5, 7, 3), reference, tables=_tables(), normed=False)
    assert found[SHIFTED_EARLIER].agreeing == 2


def test_the_other_norm_form_brings_log_probabilities_back() -> None:
    """With w = -0.5 the plain norm turns rows upside down, (1 + w) halves them."""
    wrong, right = (_tables(torch.full((VOCABULARY,), -0.5), form) for form in (PLAIN, ONE_PLUS))
    rows = _rows(2, 3, 4, 5, 7)
    recorded = right.logits(rows)[1:4].log_softmax(-1)[range(3), [3, 4, 5]]
    reference = replace(REFERENCE, logprobs=tuple(recorded.tolist()))
    found = try_misplacements(rows, reference, tables=wrong, normed=False)[NORM_FORM]
    assert found.agreeing == 3
    assert found.delta_sum_nats == pytest.approx(0.0, abs=1e-5)


def test_rows_that_passed_the_norm_are_told_from_raw_ones_whatever_the_weight() -> None:
    torch.manual_seed(0)
    tables = _tables(torch.rand(VOCABULARY) - 0.5, ONE_PLUS)
    raw = torch.randn(5, VOCABULARY) * torch.tensor([[1.0], [2.0], [5.0], [3.0], [4.0]])
    normed = tables.normalize(raw)
    assert norm_faults(raw, REFERENCE, tables=tables, normed=False) == {}
    assert norm_faults(normed, REFERENCE, tables=tables, normed=True) == {}
    assert list(norm_faults(normed, REFERENCE, tables=tables, normed=False)) == [NORM_TWICE]
    assert list(norm_faults(normed.to(torch.bfloat16), REFERENCE, tables=tables, normed=False)) == [NORM_TWICE]
    assert list(norm_faults(raw, REFERENCE, tables=tables, normed=True)) == [NORM_OMITTED]


def test_a_norm_weight_with_zeros_leaves_the_question_open() -> None:
    tables = _tables(torch.tensor([0.0] + [1.0] * (VOCABULARY - 1)))
    raw = torch.randn(5, VOCABULARY)
    assert norm_faults(tables.normalize(raw), REFERENCE, tables=tables, normed=False) == {}


def test_the_owner_of_foreign_rows_is_the_sample_they_predict() -> None:
    other = replace(REFERENCE, sample_id="b", prompt_ids=(1, 2, 3), completion_ids=(6, 7), logprobs=None)
    others = {"a": REFERENCE, "b": other}
    rows = _rows(2, 3, 6, 7, 0)
    assert find_owner(rows, REFERENCE, tables=_tables(), normed=False, others=others, above=0.0) == "b"
    longer = replace(other, prompt_ids=(1, 2, 3, 3))
    assert find_owner(rows, REFERENCE, tables=_tables(), normed=False, others={"b": longer}, above=0.0) is None
    assert find_owner(rows, REFERENCE, tables=_tables(), normed=False, others=others, above=0.9) is None
    assert find_owner(_rows(2, 3, 6, 0, 0), REFERENCE, tables=_tables(), normed=False, others=others, above=0.0) is None
