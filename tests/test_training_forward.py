"""The training forward against the evaluation backbone, a naive loop, and its own wrong variants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from dflash_model.drafter.backbone import Drafter, Group
from dflash_model.drafter.masks import visible
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.training import block_masks
from dflash_model.training.block_masks import FLEX, SDPA, Layout, dense_mask, flex_mask, masks_of_step
from dflash_model.training.forward import hidden_states
from tests.naive_drafter import draft, may_see
from tests.tiny_drafters import DFLASH2, FULL, SPEC, random_drafter, with_masks

POLICIES = {
    "full": FULL,
    "causal": MaskPolicy(in_block="causal"),
    "sliding causal": MaskPolicy(in_block="causal", window=6),
    "sliding bidirectional": MaskPolicy(in_block="bidirectional", window=3),
    "anchor-relative": MaskPolicy(in_block="bidirectional", window=4, window_origin="anchor"),
    "anchor-relative causal": MaskPolicy(in_block="causal", window=4, window_origin="anchor"),
}
UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
"""On a CPU the reference implementation is what the test wants; a fused kernel needs a GPU."""
ANCHORS = torch.tensor([[3, 9, 10, 17], [1, 2, 12, 0]])
LENGTH = 20
TWO_DOCUMENTS = torch.tensor([[0] * 8 + [1] * 9 + [-1] * 3, [0] * LENGTH])


def layout(*, documents: Tensor | None = None, **changes: int) -> Layout:
    whole = torch.zeros(2, LENGTH, dtype=torch.long)
    return Layout(anchors=ANCHORS, documents=whole if documents is None else documents, block_size=5, **changes)


def inputs(spec: DrafterSpec) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, LENGTH, spec.num_taps * spec.hidden_size, generator=generator)
    tokens = torch.randint(5, 50, (2, LENGTH), generator=generator)
    return states, tokens, torch.randn(50, spec.hidden_size, generator=generator)


def trained(drafter: Drafter, where: Layout, backend: str = SDPA, states: Tensor | None = None) -> Tensor:
    given, tokens, embedding = inputs(drafter.spec)
    tables = drafter.tables(embedding, embedding)
    return hidden_states(drafter, given if states is None else states, tokens, where, tables=tables, backend=backend)


def evaluated(drafter: Drafter) -> Tensor:
    """The same blocks through the evaluation backbone, row by row."""
    states, tokens, embedding = inputs(drafter.spec)
    outs = []
    for row in range(2):
        anchors = tuple(ANCHORS[row].tolist())
        ids = torch.full((len(anchors), 5), drafter.spec.mask_token_id)
        ids[:, 0] = tokens[row, ANCHORS[row]]
        context = drafter.make_context(states[row])
        blocks = embedding[ids] * drafter.spec.input_embedding_scale
        outs.append(drafter(blocks, [Group(context=context, anchors=anchors)]))
    return torch.stack(outs)


def furthest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_hidden_states_equal_the_evaluation_backbones(policy: MaskPolicy, tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path, with_masks(SPEC, policy, FULL))
    assert furthest(trained(drafter, layout()), evaluated(drafter)) <= 1e-5


@pytest.mark.parametrize(
    "spec",
    [DFLASH2, replace(SPEC, input_embedding_scale=3.0), replace(SPEC, rope=Rope(theta=100.0, dims=4, interleaved=True))],
    ids=["dflash2", "embedding scale", "interleaved partial rotation"],
)
def test_other_forms_equal_the_evaluation_backbone_too(spec: DrafterSpec, tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path, spec)
    out = trained(drafter, layout())
    assert furthest(out, evaluated(drafter)) <= 1e-5
    plain, _ = random_drafter(tmp_path, SPEC)
    assert furthest(out, trained(plain, layout())) > 1e-3


def test_a_shifted_drafter_keeps_slot_0(tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path, replace(SPEC, shift=1))
    out = trained(drafter, layout())
    assert out.shape == (2, 4, 5, 24)
    assert furthest(out, evaluated(drafter)) <= 1e-5


@UNFUSED
@pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS], ids=["one document", "two documents"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_flex_equals_its_sdpa_twin_for_every_mask_kind(policy: MaskPolicy, documents: Tensor | None) -> None:
    generator = torch.Generator().manual_seed(2)
    where = layout(documents=documents)
    q = torch.randn(2, 6, where.num_queries, 8, generator=generator)
    k, v = torch.randn(2, 2, 2, LENGTH + where.num_queries, 8, generator=generator).unbind(0)
    by_flex = flex_attention(q, k, v, block_mask=flex_mask(policy, where), enable_gqa=True)
    by_sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense_mask(policy, where), enable_gqa=True)
    assert furthest(by_flex, by_sdpa) < 1e-5


@UNFUSED
def test_the_whole_forward_is_the_same_by_flex(tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path, with_masks(SPEC, POLICIES["sliding causal"], FULL))
    with torch.no_grad():
        assert furthest(trained(drafter, layout(), FLEX), trained(drafter, layout(), SDPA)) < 1e-5


@pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS], ids=["one document", "two documents"])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_the_mask_is_the_naive_rule(policy: MaskPolicy, documents: Tensor | None) -> None:
    where = layout(documents=documents)
    mask = dense_mask(policy, where)
    for row in range(2):
        for query in range(where.num_queries):
            anchor, slot = int(ANCHORS[row, query // 5]), query % 5
            for key in range(LENGTH + where.num_queries):
                if key < LENGTH:
                    same = int(where.documents[row, key]) == int(where.documents[row, anchor])
                    expected = key < anchor and same and may_see(policy, anchor, slot, key)
                else:
                    block, key_slot = divmod(key - LENGTH, 5)
                    expected = block == query // 5 and may_see(policy, anchor, slot, anchor + key_slot)
                assert bool(mask[row, 0, query, key]) == expected


def test_the_mask_is_the_evaluation_backbones() -> None:
    for policy in POLICIES.values():
        other = visible(policy, ANCHORS[0], block_size=5, context_length=LENGTH)
        ours = dense_mask(policy, layout())[0, 0]
        assert torch.equal(ours, torch.cat([other[:, 20:], other[:, :20]], dim=1))


def test_each_wrong_mask_kind_changes_the_hidden_states(tmp_path: Path) -> None:
    outs = {
        name: trained(random_drafter(tmp_path, with_masks(SPEC, policy, FULL))[0], layout()) for name, policy in POLICIES.items()
    }
    names = list(outs)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            assert furthest(outs[first], outs[second]) > 1e-3, (first, second)


def test_a_telltale_in_the_anchors_state_is_never_seen(tmp_path: Path) -> None:
    drafter, weights = random_drafter(tmp_path)
    states, tokens, embedding = inputs(SPEC)
    right = trained(drafter, layout())
    told = states.clone()
    told[0, 9:] = 100.0
    told[1, 12:] = 100.0
    again = trained(drafter, layout(), states=told)
    for row, index in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)):
        assert torch.equal(right[row, index], again[row, index]), "a block saw a state at or past its anchor"
    leaking = layout(context_past_anchor=1)
    seen = furthest(trained(drafter, leaking)[0, 1], trained(drafter, leaking, states=told)[0, 1])
    assert seen > 1e-2, "the leaking variant must see the telltale, or the assertion above proves nothing"
    ids = torch.full((5,), 3)
    ids[0] = tokens[0, 9]
    wrong = draft(weights, SPEC, states[0], embedding[ids], 9, context_change=1)[1:]
    assert furthest(trained(drafter, leaking)[0, 1], wrong) < 1e-4, "the bug is the anchor's row, and nothing else"


def test_one_block_mask_per_distinct_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[MaskPolicy] = []

    def counted(policy: MaskPolicy, where: Layout) -> Tensor:
        made.append(policy)
        return dense_mask(policy, where)

    monkeypatch.setattr(block_masks, "dense_mask", counted)
    sliding = POLICIES["sliding causal"]
    masks = masks_of_step((sliding, sliding, FULL, sliding), layout(), backend=SDPA)
    assert made == [sliding, FULL] == list(masks)
    with pytest.raises(ValueError, match="attention backend"):
        masks_of_step((FULL,), layout(), backend="eager")


def test_gradients_reach_every_weight(tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path, with_masks(SPEC, POLICIES["sliding causal"], FULL))
    drafter.requires_grad_(True)
    out = trained(drafter, layout())
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None, name
        assert float(weight.grad.abs().max()) > 0, name
