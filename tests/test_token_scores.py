"""Scores of rows against tokens, worked out by hand on an identity head."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_model.target import token_scores
from dflash_model.target.tables import PLAIN, Tables


def _tables() -> Tables:
    eye = torch.eye(3)
    return Tables(
        embed=eye, head=eye, norm=torch.ones(3), norm_form=PLAIN, rms_norm_eps=0.0, embedding_scale=1.0, logit_softcap=None,
        tied=True, facts={},
    )  # fmt: skip


def test_agreement_gap_and_log_probability_of_two_rows() -> None:
    rows = torch.tensor([[0.0, math.log(2), 0.0], [math.log(4), 0.0, 0.0]])
    scores = token_scores.score_rows(rows, [1, 2], _tables(), normed=True)
    assert scores.agree.tolist() == [True, False]
    assert scores.true.tolist() == pytest.approx([math.log(2 / 4), math.log(1 / 6)])
    assert scores.best.tolist() == pytest.approx([math.log(2 / 4), math.log(4 / 6)])
    assert scores.gaps().tolist() == pytest.approx([0.0, math.log(4)])


def test_a_tie_is_no_disagreement() -> None:
    scores = token_scores.score_rows(torch.tensor([[1.0, 1.0, 0.0]] * 2), [0, 1], _tables(), normed=True)
    assert scores.agree.tolist() == [True, True]


def test_raw_rows_pass_the_norm_first() -> None:
    """RMS of (3, 0, 0) is sqrt(3), so the normed row is (sqrt(3), 0, 0)."""
    scores = token_scores.score_rows(torch.tensor([[3.0, 0.0, 0.0]]), [0], _tables(), normed=False)
    root = math.exp(math.sqrt(3))
    assert scores.true.tolist() == pytest.approx([math.log(root / (root + 2))])


def test_blocks_of_rows_give_what_one_block_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows, targets = torch.randn(11, 3), torch.randint(3, (11,)).tolist()
    whole = token_scores.score_rows(rows, targets, _tables(), normed=False)
    monkeypatch.setattr(token_scores, "ROW_BLOCK", 4)
    blocks = token_scores.score_rows(rows, targets, _tables(), normed=False)
    assert torch.equal(whole.agree, blocks.agree)
    assert torch.allclose(whole.true, blocks.true)
    assert 0 < int(whole.agree.sum()) < 11
