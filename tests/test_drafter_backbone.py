"""drafter/backbone.py against the naive reference: every mask policy, several sequences and anchors at once."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash_model.drafter.backbone import Drafter, Group
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from tests.naive_drafter import draft, turn, turn_rows
from tests.tiny_drafters import DFLASH2, FULL, ROPES, SPEC, random_drafter, with_masks

LENGTHS = (31, 14)
ANCHORS = ((9, 17, 18, 31), (14,))

DFLASH2_FIELDS = {
    name: getattr(DFLASH2, name) for name in ("family", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
}

POLICIES = {
    "full": FULL,
    "causal": MaskPolicy(in_block="causal"),
    "sliding causal, window below context": MaskPolicy(in_block="causal", window=6),
    "sliding causal, window above context": MaskPolicy(in_block="causal", window=64),
    "sliding bidirectional": MaskPolicy(in_block="bidirectional", window=6),
    "sliding bidirectional, narrower than the block": MaskPolicy(in_block="bidirectional", window=2),
    "sliding bidirectional, window above context": MaskPolicy(in_block="bidirectional", window=64),
    "from the anchor, causal": MaskPolicy(in_block="causal", window=6, window_origin="anchor"),
    "from the anchor, bidirectional": MaskPolicy(in_block="bidirectional", window=6, window_origin="anchor"),
}


def inputs(spec: DrafterSpec) -> tuple[list[torch.Tensor], torch.Tensor]:
    """States of two sequences, and five embedded blocks."""
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(length, spec.num_taps * spec.hidden_size, generator=generator) for length in LENGTHS]
    return states, torch.randn(5, spec.block_size, spec.hidden_size, generator=generator)


def groups_of(drafter: Drafter, states: list[torch.Tensor]) -> list[Group]:
    return [
        Group(context=drafter.make_context(rows, chunk_rows=10), anchors=anchors)
        for rows, anchors in zip(states, ANCHORS, strict=True)
    ]


def reference(weights: dict[str, torch.Tensor], spec: DrafterSpec) -> torch.Tensor:
    states, blocks = inputs(spec)
    places = [(rows, anchor) for rows, anchors in zip(states, ANCHORS, strict=True) for anchor in anchors]
    drafts = [draft(weights, spec, rows, blocks[i], anchor) for i, (rows, anchor) in enumerate(places)]
    return torch.stack(drafts)[:, 1 - spec.shift :]


def backbone(drafter: Drafter) -> torch.Tensor:
    states, blocks = inputs(drafter.spec)
    return drafter(blocks, groups_of(drafter, states))


def furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_hidden_states_equal_the_naive_reference(policy: MaskPolicy, tmp_path: Path) -> None:
    spec = with_masks(SPEC, policy, FULL)
    drafter, weights = random_drafter(tmp_path, spec)
    assert furthest(backbone(drafter), reference(weights, spec)) < 1e-5


def test_each_policy_gives_other_hidden_states(tmp_path: Path) -> None:
    """A window above the context changes nothing; all else must, or the comparison above would prove little."""
    outs = {name: backbone(random_drafter(tmp_path, with_masks(SPEC, policy, FULL))[0]) for name, policy in POLICIES.items()}
    same = {
        frozenset({"full", "sliding bidirectional, window above context"}),
        frozenset({"causal", "sliding causal, window above context"}),
    }
    for first in outs:
        for second in outs:
            if first != second:
                assert (furthest(outs[first], outs[second]) < 1e-5) == (frozenset({first, second}) in same), (first, second)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"rope": Rope(theta=100.0, dims=4)},
        {"num_heads": 2},
        {"tap_indices": (4,)},
        {"block_size": 2},
        {"num_layers": 1, "layer_masks": (FULL,)},
        *({"rope": rope} for rope in ROPES.values()),
        DFLASH2_FIELDS,
        DFLASH2_FIELDS | {"conv_kernel_size": 1, "conv_group_size": 24, "shift": 1},
        DFLASH2_FIELDS | {"conv_kernel_size": 7, "conv_group_size": 1},
    ],
    ids=str,
)
def test_other_geometries_equal_the_reference(change: dict[str, object], tmp_path: Path) -> None:
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    drafter, weights = random_drafter(tmp_path, spec)
    assert furthest(backbone(drafter), reference(weights, spec)) < 1e-5


def test_rotation_dims_and_theta_matter(tmp_path: Path) -> None:
    right = backbone(random_drafter(tmp_path)[0])
    for rope in (Rope(theta=1000.0, dims=8), *ROPES.values()):
        assert furthest(right, backbone(random_drafter(tmp_path, replace(SPEC, rope=rope))[0])) > 1e-2


def test_shift_decides_whether_slot_0_is_kept(tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path)
    shifted, _ = random_drafter(tmp_path, replace(SPEC, shift=1))
    dropped, kept = backbone(drafter), backbone(shifted)
    assert (dropped.shape, kept.shape) == ((5, 4, 24), (5, 5, 24))
    assert torch.equal(kept[:, 1:], dropped)


def test_the_anchors_own_state_is_not_context(tmp_path: Path) -> None:
    drafter, weights = random_drafter(tmp_path)
    states, blocks = inputs(SPEC)
    right = drafter(blocks[:1], [Group(context=drafter.make_context(states[0]), anchors=(9,))])[0]
    changed = states[0].clone()
    changed[9:] = 100.0
    again = drafter(blocks[:1], [Group(context=drafter.make_context(changed), anchors=(9,))])[0]
    assert torch.equal(right, again)
    for mistake in ({"context_change": -1}, {"context_change": 1}, {"position_change": 1}):
        assert furthest(right, draft(weights, SPEC, states[0], blocks[0], 9, **mistake)[1:]) > 1e-2


def test_blocks_computed_together_equal_blocks_computed_alone_and_scratch_leaves_no_trace(tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path, with_masks(SPEC, MaskPolicy(in_block="causal", window=6), FULL))
    states, blocks = inputs(drafter.spec)
    groups = groups_of(drafter, states)
    together = drafter(blocks, groups)
    places = [(group.context, anchor) for group in groups for anchor in group.anchors]
    alone = [drafter(blocks[i : i + 1], [Group(context=c, anchors=(a,))])[0] for i, (c, a) in enumerate(places)]
    assert furthest(together, torch.stack(alone)) < 1e-5
    assert torch.equal(together, drafter(blocks, groups))


@pytest.mark.parametrize("policy", [FULL, MaskPolicy(in_block="causal", window=6)], ids=["full", "sliding"])
def test_a_shortened_block_equals_a_block_of_that_size(policy: MaskPolicy, tmp_path: Path) -> None:
    """What stands past its rows is not seen: for a bidirectional block that is another result than the whole block's."""
    drafter, _ = random_drafter(tmp_path, with_masks(SPEC, policy, policy))
    short = load_drafter(tmp_path / "model.safetensors", replace(drafter.spec, block_size=3))
    states, blocks = inputs(drafter.spec)
    context = drafter.make_context(states[0])
    cut = drafter(blocks[:2], [Group(context=context, anchors=(9, 20), rows=(3, 5))])
    whole = drafter(blocks[:2], [Group(context=context, anchors=(9, 20))])
    alone = short(blocks[:1, :3], [Group(context=short.make_context(states[0]), anchors=(9,))])
    assert furthest(cut[0, :2], alone[0]) < 1e-5
    assert furthest(cut[1], whole[1]) < 1e-5
    assert bool(torch.isfinite(cut).all())
    if policy is FULL:
        assert furthest(cut[0, :2], whole[0, :2]) > 1e-2


def test_context_k_and_v_are_made_once_per_row_and_independent_of_row_chunks(tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path)
    states, _ = inputs(SPEC)
    ctx = drafter.context_features(states[0])
    assert ctx.shape == (31, 24)
    whole = drafter.context_kv(ctx, torch.arange(31))
    assert [tuple(t.shape) for layer in whole for t in layer] == [(31, 2, 8)] * 4
    context = drafter.make_context(states[0], chunk_rows=7)
    assert (context.length, context.block_size) == (31, 5)
    assert context.size_bytes == drafter.context_bytes(31) == 2 * 2 * 2 * 36 * 8 * 4
    for layer, (keys, values) in enumerate(whole):
        assert furthest(context.keys[layer][:, 5:].transpose(0, 1), keys) < 1e-5
        assert furthest(context.values[layer][:, 5:].transpose(0, 1), values) < 1e-5
    moved = drafter.context_kv(ctx, torch.arange(1, 32))
    assert furthest(moved[0][0], whole[0][0]) > 1e-2
    assert torch.equal(moved[0][1], whole[0][1])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    drafter, _ = random_drafter(tmp_path)
    states, blocks = inputs(SPEC)
    context = drafter.make_context(states[1])
    with pytest.raises(ValueError, match="for 2 anchors of 5 rows"):
        drafter(blocks[:1], [Group(context=context, anchors=(3, 4))])
    with pytest.raises(ValueError, match="6 rows of a block of 5"):
        drafter(blocks[:1], [Group(context=context, anchors=(3,), rows=(6,))])
    wider = load_drafter(tmp_path / "model.safetensors", replace(SPEC, block_size=6))
    with pytest.raises(ValueError, match="with room for 5"):
        wider(torch.cat([blocks[:1], blocks[:1, :1]], dim=1), [Group(context=context, anchors=(3,))])
    with pytest.raises(ValueError, match="for a context of 14 rows"):
        drafter(blocks[:1], [Group(context=context, anchors=(15,))])


def test_the_references_fast_rotation_is_the_textbook_one() -> None:
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    positions = [0, 1, 5, 300]
    for rope in (SPEC.rope, *ROPES.values()):
        slow = torch.stack([turn(row, position, rope) for row, position in zip(rows, positions, strict=True)])
        assert furthest(turn_rows(rows, positions, rope), slow) < 1e-4
