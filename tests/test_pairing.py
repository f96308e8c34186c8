"""Two drafters are only compared on the same tokens."""

from dataclasses import replace

import pytest

from dflash_model.errors import InputError
from dflash_model.pairing import check_same_tokens
from tests.made_up_records import hand_records

NAMES = ("new", "old")
A = hand_records("a", [[0, 0, 9]] * 4, completion=4, overshoot=3)
B = hand_records("b", [[9, 9, 9]] * 2, completion=2, overshoot=3)


def test_the_same_references_pass_whatever_was_drafted() -> None:
    other = hand_records("a", [[9, 9, 9]] * 4, completion=4, overshoot=3)
    check_same_tokens([A, B], [other, B], names=NAMES)


def test_another_block_size_and_other_anchors_still_pair() -> None:
    wide = hand_records("a", [[0, 0, 9, 9, 9]] * 4, completion=4, overshoot=5)
    check_same_tokens([A], [wide], names=NAMES)


def test_tokens_that_only_one_side_knows_are_no_difference() -> None:
    check_same_tokens([A], [hand_records("a", [[0, 0, 9]] * 4, completion=4, overshoot=0)], names=NAMES)


def test_another_token_is_named_with_its_prompt() -> None:
    changed = A.true_ids.copy()
    changed[2, 0] += 1
    with pytest.raises(InputError, match="new and old were scored on different tokens of prompt a"):
        check_same_tokens([replace(A, true_ids=changed)], [A], names=NAMES)


def test_another_length_is_a_difference() -> None:
    shorter = replace(A, sequence=replace(A.sequence, completion_length=3))
    with pytest.raises(InputError, match="different tokens of prompt a"):
        check_same_tokens([A], [shorter], names=NAMES)


def test_missing_prompts_and_another_order_are_told_apart() -> None:
    with pytest.raises(InputError, match="only one has b"):
        check_same_tokens([A, B], [A], names=NAMES)
    with pytest.raises(InputError, match="their order differs"):
        check_same_tokens([A, B], [B, A], names=NAMES)
