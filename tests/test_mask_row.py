"""drafter/mask_row.py: a mask row that nothing trained, and a mask id that ends answers."""

from dataclasses import replace

import torch

from dflash_model.drafter.mask_row import mask_warnings
from tests.tiny_drafters import SPEC

ROWS = torch.full((50, 24), 2.0, dtype=torch.bfloat16)


def test_a_healthy_row_is_silent() -> None:
    assert mask_warnings(SPEC, ROWS[3], ROWS, stop_ids=[2]) == []
    assert mask_warnings(SPEC, ROWS[3] * 0.01, ROWS, stop_ids=[]) == []


def test_a_row_that_is_nearly_zero_is_named_with_both_norms() -> None:
    for factor in (0.0, 0.0005):
        (warning,) = mask_warnings(SPEC, ROWS[3] * factor, ROWS, stop_ids=[])
        assert warning.startswith("The embedding row of mask_token_id 3 is nearly zero (norm ")
        assert "the median row's is 9.8" in warning


def test_a_mask_embedding_is_measured_in_the_rows_place_and_its_id_does_not_matter() -> None:
    own = replace(SPEC, mask_embedding=True)
    assert mask_warnings(own, ROWS[3], ROWS, stop_ids=[3]) == []
    (warning,) = mask_warnings(own, ROWS[3] * 0.0, ROWS, stop_ids=[3])
    assert warning.startswith("mask_embedding is nearly zero")


def test_an_id_that_ends_answers_is_a_warning() -> None:
    (warning,) = mask_warnings(SPEC, ROWS[3], ROWS, stop_ids=[2, 3])
    assert warning.startswith("mask_token_id is 3, a token that ends the target's answers")


def test_rows_that_are_mostly_padding_do_not_hide_a_zero_mask_row() -> None:
    wide = torch.cat([torch.ones(6000, 24), torch.zeros(5000, 24)])
    assert len(mask_warnings(SPEC, torch.zeros(24), wide, stop_ids=[])) == 1
