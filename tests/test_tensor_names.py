"""Wrappers and prefixes of tensor names, in every order."""

import itertools

import pytest

from dflash_model.checkpoint.tensor_names import clean_names, drop_reason
from dflash_model.errors import CheckpointError

CORE = ["fc.weight", "hidden_norm.weight", "layers.0.mlp.up_proj.weight", "norm.weight"]


@pytest.mark.parametrize(
    "parts",
    [
        parts
        for count in range(4)
        for parts in itertools.permutations(["module.", "_orig_mod.", "_fsdp_wrapped_module.", "draft_model.", "model."], count)
    ],
    ids="".join,
)
def test_prefixes_come_off_in_any_order_and_nesting(parts: tuple[str, ...]) -> None:
    names = ["".join(parts) + name for name in CORE]
    found = clean_names(names, "f")
    assert list(found.clean.values()) == CORE
    assert sorted(found.prefixes) == sorted(parts)


def test_the_same_prefix_twice_comes_off_twice() -> None:
    assert list(clean_names([f"module.module.{name}" for name in CORE], "f").clean.values()) == CORE


def test_wrapper_parts_go_from_the_middle_too() -> None:
    names = ["fc.weight", "layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj.weight", "norm._orig_mod.weight"]
    assert list(clean_names(names, "f").clean.values()) == ["fc.weight", "layers.0.mlp.up_proj.weight", "norm.weight"]


def test_a_majority_with_the_core_is_enough_and_a_minority_is_not() -> None:
    mostly = [f"model.{name}" for name in CORE] + ["lm_head.weight", "extra.weight"]
    assert list(clean_names(mostly, "f").clean.values()) == [*CORE, "lm_head.weight", "extra.weight"]
    hardly = ["model.fc.weight", "other.a", "other.b", "other.c"]
    assert list(clean_names(hardly, "f").clean.values()) == hardly
    without_core = ["model.a.weight", "model.b.weight", "fc.weight"]
    assert list(clean_names(without_core, "f").clean.values()) == without_core


def test_tensors_that_will_be_dropped_do_not_vote() -> None:
    names = [f"model.{name}" for name in CORE] + [f"verifier_norm.{i}" for i in range(50)]
    assert list(clean_names(names, "f").clean.values())[:4] == CORE


def test_a_module_that_happens_to_be_called_model_keeps_its_name_inside() -> None:
    names = ["fc.weight", "layers.0.model.weight", "layers.0.module.weight"]
    assert list(clean_names(names, "f").clean.values()) == names


def test_torchspec_spelling_is_translated() -> None:
    found = clean_names(["module.context_proj.weight", "module.context_norm.weight", "module.layers.0.context_proj.weight"], "f")
    assert list(found.clean.values()) == ["fc.weight", "hidden_norm.weight", "layers.0.context_proj.weight"]
    assert found.renamed == {"module.context_proj.weight", "module.context_norm.weight"}


def test_a_name_that_is_only_a_prefix_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="only a prefix"):
        clean_names(["_orig_mod"], "f")


@pytest.mark.parametrize(
    ("name", "plainly", "with_vocab"),
    [
        ("embed_tokens.weight", True, False), ("lm_head.weight", True, False), ("t2d", True, False), ("d2t", True, False),
        ("verifier_norm.weight", True, True), ("verifier_lm_head.weight", True, True), ("rotary_emb.inv_freq", True, True),
        ("layers.0.self_attn.rotary_emb.inv_freq", True, True), ("layers.0.self_attn.rotary_emb.original_inv_freq", True, True),
        ("fc.weight", False, False), ("layers.0.embed_tokens.weight", False, False), ("norm.weight", False, False),
    ],
)  # fmt: skip
def test_what_is_dropped(name: str, plainly: bool, with_vocab: bool) -> None:
    assert (drop_reason(name, keep_vocab=False) is not None) == plainly
    assert (drop_reason(name, keep_vocab=True) is not None) == with_vocab
