"""drafter/masks.py against a Python loop over every query and key, and against each other."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_model.drafter.masks import sees_everything, visible
from dflash_model.drafter.spec import MaskPolicy
from tests.naive_drafter import may_see

POLICIES = [
    MaskPolicy(in_block=in_block, window=window, window_origin=origin)
    for in_block, window, origin in itertools.product(("bidirectional", "causal"), (None, 1, 3, 6, 40), ("query", "anchor"))
]


def by_loop(policy: MaskPolicy, anchors: list[int], block_size: int, context_length: int) -> torch.Tensor:
    rows = []
    for own, anchor in enumerate(anchors):
        for slot in range(block_size):
            row = []
            for other, other_anchor in enumerate(anchors):
                row += [other == own and may_see(policy, anchor, slot, other_anchor + key) for key in range(block_size)]
            row += [key < anchor and may_see(policy, anchor, slot, key) for key in range(context_length)]
            rows.append(row)
    return torch.tensor(rows)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("anchors", [[7], [0], [7, 9, 9], [12, 2]])
def test_every_policy_equals_the_loop(policy: MaskPolicy, anchors: list[int]) -> None:
    mask = visible(policy, torch.tensor(anchors), block_size=4, context_length=12)
    assert torch.equal(mask, by_loop(policy, anchors, 4, 12))


def test_policies_that_mean_different_things_give_different_masks() -> None:
    """Otherwise the comparison with the loop could pass for a mask that ignores its policy."""
    masks = {
        policy: tuple(visible(policy, torch.tensor([9, 14]), block_size=4, context_length=14).flatten().tolist())
        for policy in POLICIES
        if policy.window in (None, 3, 6)
    }
    windowless = {policy for policy in masks if policy.window is None}
    # Without a window its origin means nothing: two masks for four policies. All others are distinct.
    assert len({masks[policy] for policy in windowless}) == 2
    assert len(set(masks.values())) == len(masks) - 2


def test_the_window_edge_by_hand() -> None:
    """Anchor 9, slot 2 is position 11; a window of 3 shows 9, 10, 11 (own block), and no context; slot 0 shows 7, 8."""
    mask = visible(MaskPolicy(in_block="causal", window=3), torch.tensor([9]), block_size=3, context_length=9)
    assert mask[2].nonzero().flatten().tolist() == [0, 1, 2]
    assert mask[0].nonzero().flatten().tolist() == [0, 3 + 7, 3 + 8]
    anchored = visible(
        MaskPolicy(in_block="causal", window=3, window_origin="anchor"), torch.tensor([9]), block_size=3, context_length=9
    )
    assert anchored[2].nonzero().flatten().tolist() == [0, 1, 2, 3 + 6, 3 + 7, 3 + 8]


def test_the_anchor_and_what_follows_is_never_context() -> None:
    mask = visible(MaskPolicy(in_block="bidirectional"), torch.tensor([4]), block_size=2, context_length=8)
    assert mask[:, 2:].all(dim=0).tolist() == [True] * 4 + [False] * 4


@given(
    policy=st.sampled_from(POLICIES),
    anchor=st.integers(0, 50),
    block_size=st.integers(2, 5),
)
def test_sees_everything_is_what_the_mask_says(policy: MaskPolicy, anchor: int, block_size: int) -> None:
    mask = visible(policy, torch.tensor([anchor]), block_size=block_size, context_length=anchor)
    assert sees_everything(policy, anchor, block_size=block_size) == bool(mask.all())
