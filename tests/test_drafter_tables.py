"""Own embedding, head, vocabulary, mask embedding and selector: drafted tokens equal the naive reference's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.drafter.backbone import Drafter, Group
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import CheckpointError, ConfigError
from tests.naive_drafter import block_rows, draft, propose
from tests.tiny_drafters import DFLASH2, SPEC, random_drafter, random_weights

TABLES = torch.Generator().manual_seed(5)
EMBEDDING, HEAD = torch.randn(50, 24, generator=TABLES), torch.randn(50, 24, generator=TABLES)
STATES = torch.randn(30, 72, generator=TABLES)
ANCHORS, TOKENS = (4, 11, 29), torch.tensor([7, 0, 49])

FORMS: dict[str, DrafterSpec] = {
    "plain": SPEC,
    "own embedding": replace(SPEC, owns_embedding=True),
    "own head": replace(SPEC, owns_head=True),
    "shifted, own embedding and head": replace(SPEC, shift=1, owns_embedding=True, owns_head=True),
    "reduced vocabulary": replace(SPEC, owns_head=True, draft_vocab_size=20),
    "mask embedding": replace(SPEC, mask_embedding=True, mask_token_id=10**6),
    "embedding scale": replace(SPEC, input_embedding_scale=4.9),
    "scaled mask embedding": replace(SPEC, mask_embedding=True, input_embedding_scale=0.2),
    "dflash2": DFLASH2,
    "dflash2, shifted": replace(DFLASH2, shift=1),
    "dflash2, multiplier": replace(DFLASH2, output_multiplier=0.2),
    "dflash2, soft cap": replace(DFLASH2, final_logit_softcapping=1.5),
    "dflash2, multiplier and soft cap": replace(DFLASH2, output_multiplier=0.2, final_logit_softcapping=1.5),
    "dflash2, own head": replace(DFLASH2, owns_head=True),
    "dflash2, one candidate": replace(DFLASH2, selector_top_k=1),
}


def drafted(drafter: Drafter) -> list[list[int]]:
    tables = drafter.tables(EMBEDDING, HEAD)
    context = drafter.make_context(STATES)
    hidden = drafter(tables.blocks(TOKENS), [Group(context=context, anchors=ANCHORS)])
    found: list[list[int]] = drafter.propose(hidden, TOKENS, tables).tolist()
    return found


@pytest.mark.parametrize("spec", FORMS.values(), ids=FORMS.keys())
def test_drafted_tokens_equal_the_naive_reference(spec: DrafterSpec, tmp_path: Path) -> None:
    drafter, weights = random_drafter(tmp_path, spec)
    expected = []
    for anchor, token in zip(ANCHORS, TOKENS.tolist(), strict=True):
        hidden = draft(weights, spec, STATES, block_rows(weights, spec, EMBEDDING, token), anchor)
        expected.append(propose(weights, spec, hidden, HEAD, token))
    assert drafted(drafter) == expected


def test_every_form_drafts_other_tokens(tmp_path: Path) -> None:
    """Only a single candidate leaves the selector nothing to choose; all else must matter."""
    found = {name: str(drafted(random_drafter(tmp_path, spec)[0])) for name, spec in FORMS.items()}
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize(
    "name",
    [
        "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook",
        "candidate_selector.hidden_projection.weight", "layers.1.attention_conv.base_kernel",
        "layers.0.mlp_conv.kernel_projection.weight",
    ],
)  # fmt: skip
def test_every_added_tensor_matters(name: str, tmp_path: Path) -> None:
    right = drafted(random_drafter(tmp_path, DFLASH2)[0])
    weights = random_weights(DFLASH2)
    save_file(weights | {name: weights[name].flip(0).contiguous()}, tmp_path / "model.safetensors")
    assert drafted(load_drafter(tmp_path / "model.safetensors", DFLASH2)) != right


def test_convolutions_that_are_the_identity_and_a_silent_selector_give_plain_dflash(tmp_path: Path) -> None:
    weights = random_weights(DFLASH2)
    for name, tensor in weights.items():
        if "_conv." in name or "candidate_selector" in name:
            tensor.zero_()
            if name.endswith("base_kernel"):
                tensor[:, 0] = 1.0
    save_file(weights, tmp_path / "model.safetensors")
    assert drafted(load_drafter(tmp_path / "model.safetensors", DFLASH2)) == drafted(random_drafter(tmp_path, SPEC)[0])


@pytest.mark.parametrize("spec", [replace(SPEC, owns_embedding=True), DFLASH2], ids=["own embedding", "selector"])
def test_a_vocabulary_that_no_config_states_is_that_of_the_drafters_own_tables(spec: DrafterSpec, tmp_path: Path) -> None:
    right, _ = random_drafter(tmp_path, spec)
    found = load_drafter(tmp_path / "model.safetensors", replace(spec, vocab_size=None))
    assert drafted(found) == drafted(right)
    assert found.spec.vocab_size == 50


def test_bf16_is_an_option_and_stays_near(tmp_path: Path) -> None:
    random_drafter(tmp_path, DFLASH2)
    drafter = load_drafter(tmp_path / "model.safetensors", DFLASH2, dtype=torch.bfloat16)
    assert drafter.tables(EMBEDDING, HEAD).head.dtype == torch.bfloat16
    fine, rough = drafted(load_drafter(tmp_path / "model.safetensors", DFLASH2)), drafted(drafter)
    same = sum(a == b for x, y in zip(fine, rough, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 6


def broken_map(ids: list[int]) -> dict[str, Any]:
    return {"d2t": torch.tensor(ids) - torch.arange(len(ids))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken_map([1, 2, 2]), "1 head rows a token that another has"),
        (broken_map([1, 2, 50]), r"maps row 2 to token 50, outside 0\.\.49"),
        (broken_map([-1, 2, 3]), r"maps row 0 to token -1, outside 0\.\.49"),
        ({"d2t": torch.tensor([0.0, 1.0, 2.0])}, "d2t in .* is stored as float32"),
        ({"d2t": torch.tensor([0, 1])}, r"d2t in .* has shape \[2\], but the config asks for \[3\]"),
        ({"t2d": torch.zeros(50)}, "holds 1 tensors that the drafter does not use: t2d"),
        ({"lm_head.weight": torch.full((3, 24), torch.nan)}, "lm_head.weight in .* holds NaN"),
        ({"lm_head.weight": torch.zeros(50, 24)}, r"has shape \[50, 24\], but the config asks for \[3, 24\]"),
    ],
    ids=str,
)
def test_a_broken_vocabulary_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    spec = replace(SPEC, owns_head=True, draft_vocab_size=3)
    save_file(random_weights(spec), tmp_path / "model.safetensors")
    load_drafter(tmp_path / "model.safetensors", spec)
    save_file(random_weights(spec) | change, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_drafter(tmp_path / "model.safetensors", spec)


def test_tables_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    own, _ = random_drafter(tmp_path, replace(SPEC, owns_embedding=True, mask_token_id=50))
    with pytest.raises(ConfigError, match="mask_token_id 50, but its own embedding has 50 rows"):
        own.tables(EMBEDDING, HEAD)
    random_drafter(tmp_path, FORMS["reduced vocabulary"])
    reduced = load_drafter(tmp_path / "model.safetensors", replace(FORMS["reduced vocabulary"], vocab_size=None))
    with pytest.raises(CheckpointError, match="outside 0"):
        reduced.tables(EMBEDDING[:15], HEAD[:15])
