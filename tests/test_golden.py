"""The backbone against what PyPI dflash and speculators computed (tests/data/golden), and every way to get it wrong.

A mistake that drafts the same tokens would show that the vectors cannot tell the conventions apart, so each must change
some. tests/golden/make_golden.py made the vectors.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.reading import Tensors, read_directory
from tests.golden_vectors import (
    GOLDEN,
    NAMES,
    Mistake,
    Vector,
    read_vector,
    renamed,
    run,
    with_masks,
    with_rope,
    with_spec,
    with_weights,
    with_windows,
    without,
)
from tests.naive_drafter import block_rows, draft, propose, slot_logits

CONVENTIONS = {
    "full", "sliding_causal", "sliding_bidirectional", "mixed", "dflash2", "embedding_scale", "multiplier_and_soft_cap",
    "attention_bias", "rope_linear", "rope_llama3", "rope_yarn", "rope_partial", "rope_multi_section", "rope_interleaved",
    "speculators_anchor_window", "speculators_anchor_window_bidirectional", "speculators_mixed", "speculators_shifted",
    "speculators_own_tables", "speculators_reduced_vocabulary", "speculators_dflash2",
}  # fmt: skip
HALVES = {"layers.0.": "layers.1."}


def test_every_convention_has_a_vector_and_they_are_small() -> None:
    assert set(NAMES) >= CONVENTIONS
    assert sum(path.stat().st_size for path in GOLDEN.iterdir()) < 3_000_000
    libraries = {json.loads((GOLDEN / f"{name}.json").read_text())["library"] for name in NAMES}
    assert libraries == {"dflash 0.1.0", "speculators 0.9.0"}


@pytest.mark.parametrize("name", NAMES)
def test_hidden_states_and_drafted_tokens_equal_the_public_implementation(name: str, tmp_path: Path) -> None:
    vector = read_vector(name)
    save_file(vector.weights, tmp_path / "model.safetensors")
    hidden, logits, tokens = run(vector, load_drafter(tmp_path / "model.safetensors", vector.spec))
    assert float((hidden - vector.hidden).abs().max()) < 1e-5
    torch.testing.assert_close(logits, vector.logits, rtol=0.0, atol=1e-4)
    assert torch.equal(tokens, vector.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_the_public_config_reads_as_the_convention_that_was_run(name: str) -> None:
    vector = read_vector(name)
    shapes = {key: tuple(tensor.shape) for key, tensor in vector.weights.items()}
    tensors = Tensors(shapes=shapes, read_map=lambda: vector.weights["d2t"].numpy())
    found = read_directory(tensors, vector.config)
    assert replace(found.spec, provenance={}) == vector.spec
    assert found.warnings == ()


@pytest.mark.parametrize("name", NAMES)
def test_the_naive_reference_agrees_with_the_public_implementation(name: str) -> None:
    vector = read_vector(name)
    weights = {key: value.float() if value.is_floating_point() else value for key, value in vector.weights.items()}
    for row in (0, 3):
        anchor, token = vector.anchors[row], int(vector.anchor_ids[row])
        hidden = draft(weights, vector.spec, vector.states, block_rows(weights, vector.spec, vector.embedding, token), anchor)
        assert float((hidden[1 - vector.spec.shift :] - vector.hidden[row]).abs().max()) < 1e-5
        torch.testing.assert_close(
            slot_logits(weights, vector.spec, hidden, vector.head), vector.logits[row], rtol=0.0, atol=1e-4
        )
        assert propose(weights, vector.spec, hidden, vector.head, token) == vector.tokens[row].tolist()


ALWAYS: dict[str, Mistake] = {
    "taps in the wrong order": with_weights("fc.weight", lambda fc: torch.cat(fc.chunk(2, dim=1)[::-1], dim=1)),
    "layers in the wrong order": renamed(HALVES),
    "states one position late": lambda vector: replace(vector, states=vector.states.roll(1, dims=0)),
    "states one position early": lambda vector: replace(vector, states=vector.states.roll(-1, dims=0)),
    "anchors one late": lambda vector: replace(vector, anchors=tuple(anchor + 1 for anchor in vector.anchors)),
    "anchors one early": lambda vector: replace(vector, anchors=tuple(anchor - 1 for anchor in vector.anchors)),
    "the token before the anchor's": lambda vector: replace(vector, anchor_ids=(vector.anchor_ids + 1) % len(vector.embedding)),
    "another mask id": with_spec(mask_token_id=4),
    "theta": with_rope(theta=10_000.0),
    "q not normed as trained": with_weights("q_norm", torch.ones_like),
    "final norm left out": with_weights("norm.weight", torch.ones_like),
}
SLIDES: dict[str, Mistake] = {
    "window one wider": with_windows(1),
    "window one narrower": with_windows(-1),
    "window ignored": with_masks(window=None),
}
SELECTS: dict[str, Mistake] = {
    "convolutions of input and output exchanged": with_weights("base_kernel", lambda kernel: kernel.flip(0)),
    "convolution backwards": with_weights("base_kernel", lambda kernel: kernel.flip(1)),
    "own kernels of input and output exchanged": with_weights("kernel_projection", lambda w: torch.cat(w.chunk(2)[::-1])),
    "own kernels left out": with_weights("kernel_projection", torch.zeros_like),
    "attention's and mlp's convolutions exchanged": renamed({"attention_conv": "mlp_conv"}),
    "codebooks exchanged": renamed({"predecessor_codebook": "successor_codebook"}),
    "selector left out": with_weights("codebook", torch.zeros_like),
    "another number of candidates": with_spec(selector_top_k=2),
    "groups interleaved": with_weights("base_kernel", lambda kernel: kernel.roll(8, dims=2)),
}


def mistakes_of(vector: Vector) -> dict[str, Mistake]:
    """Every mistake that this vector's convention allows."""
    spec, rope = vector.spec, vector.spec.rope
    found = dict(ALWAYS)
    policies = set(spec.layer_masks)
    if any(policy.window for policy in policies):
        found |= SLIDES
        origin = next(policy.window_origin for policy in policies if policy.window)
        flipped = {"query": "anchor", "anchor": "query"}[origin]
        found["window from the wrong origin"] = with_masks(window_origin=flipped)
    else:
        found["a window"] = with_masks(window=6)
    for in_block in ("causal", "bidirectional"):
        if {policy.in_block for policy in policies} != {in_block}:
            found[f"{in_block} everywhere"] = with_masks(in_block=in_block)
    if len(policies) > 1:
        found["masks of the layers exchanged"] = with_spec(layer_masks=spec.layer_masks[::-1])
    found["shift"] = with_spec(shift=1 - spec.shift)
    found["pairs of the rotation"] = with_rope(interleaved=not rope.interleaved)
    found["rotated dimensions"] = with_rope(dims=rope.dims // 2 if rope.dims == spec.head_dim else spec.head_dim, sections=None)
    if rope.type != "default":
        found["rotation unscaled"] = with_rope(type="default", scaling=())
        found["factor of the rotation"] = with_rope(scaling=tuple((k, v * 2 if k == "factor" else v) for k, v in rope.scaling))
    if rope.type == "yarn":
        found["attention factor"] = with_rope(scaling=(("attention_factor", 1.0), *rope.scaling[1:]))
        found["beta_fast"] = with_rope(scaling=(rope.scaling[0], ("beta_fast", 32.0), *rope.scaling[2:]))
        found["bounds not rounded"] = with_rope(scaling=(*rope.scaling[:-1], ("truncate", 0.0)))
    if spec.attention_bias:
        found |= {
            f"{name} without its bias": with_weights(f"{name}.bias", torch.zeros_like)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
    if spec.input_embedding_scale != 1.0:
        found["embedding unscaled"] = with_spec(input_embedding_scale=1.0)
    if spec.family == "dflash2":
        found |= SELECTS
        if spec.final_logit_softcapping is not None:
            found |= {"no soft cap": with_spec(final_logit_softcapping=None), "no multiplier": with_spec(output_multiplier=1.0)}
    if spec.draft_vocab_size is not None:
        found["rows taken for tokens"] = with_weights("d2t", torch.zeros_like)
    elif spec.owns_head:
        found["the target's head"] = without("lm_head.weight", owns_head=False)
    if spec.owns_embedding:
        found["the target's embedding"] = without("embed_tokens.weight", owns_embedding=False)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_mistake_changes_drafted_tokens(name: str) -> None:
    vector = read_vector(name)
    blind = []
    for what, mistake in mistakes_of(vector).items():
        tokens = run(mistake(vector))[2]
        common = min(tokens.shape[1], vector.tokens.shape[1])
        if torch.equal(tokens[:, :common], vector.tokens[:, :common]):
            blind.append(what)
    assert blind == []


def test_soft_cap_and_multiplier_change_the_logits_of_a_plain_drafter_and_no_token() -> None:
    """Both keep the order, so only probabilities can tell."""
    vector = read_vector("multiplier_and_soft_cap")
    for mistake in (with_spec(final_logit_softcapping=None), with_spec(output_multiplier=1.0)):
        _, logits, tokens = run(mistake(vector))
        assert torch.equal(tokens, vector.tokens)
        assert float((logits - vector.logits).abs().max()) > 0.1


def test_the_vectors_hold_contexts_shorter_than_the_window_and_longer() -> None:
    for name in NAMES:
        vector = read_vector(name)
        for window in {policy.window for policy in vector.spec.layer_masks} - {None}:
            assert min(vector.anchors) < int(window or 0) < max(vector.anchors)
