"""drafter/rotary.py against transformers' own frequencies, at its long positions too."""

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as turn_interleaved
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb as turn_halves

from dflash_model.drafter.rotary import frequencies, rotate, rotation_table
from dflash_model.drafter.spec import Rope

POSITIONS = torch.tensor([0, 1, 7, 4095, 131_071])
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 32, "beta_slow": 1}
CASES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": YARN | {"truncate": True},
    "yarn, bounds as they are": YARN | {"truncate": False},
    "yarn, attention factor given": YARN | {"truncate": True, "attention_factor": 1.7},
    "yarn, bounds that meet": YARN | {"truncate": True, "beta_fast": 1e-9, "beta_slow": 1e-9},
}  # fmt: skip


def ours(parameters: dict[str, float | str], factor: float) -> Rope:
    kind = str(parameters["rope_type"])
    numbers = {name: float(value) for name, value in parameters.items() if name != "rope_type"}
    if kind == "yarn":
        numbers["attention_factor"] = factor
    return Rope(theta=1e6, dims=128, type=kind, scaling=tuple(sorted(numbers.items())))


@pytest.mark.parametrize("parameters", CASES.values(), ids=CASES.keys())
def test_frequencies_and_factor_equal_transformers(parameters: dict[str, float | str]) -> None:
    config = Qwen3Config(
        head_dim=128, hidden_size=256, num_attention_heads=2, max_position_embeddings=131072,
        rope_parameters=parameters | {"rope_theta": 1e6},
    )  # fmt: skip
    rates, factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, None)
    rope = ours(parameters, factor)
    found, stretch = frequencies(rope)
    assert stretch == factor
    torch.testing.assert_close(torch.tensor(found), rates, rtol=1e-6, atol=0.0)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), POSITIONS[None])
    table = rotation_table(rope, POSITIONS, dtype=torch.float32)
    torch.testing.assert_close(table.cos, cos[0], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(table.sin, sin[0], rtol=0.0, atol=1e-5)


def test_the_types_are_different_rotations() -> None:
    found = {name: frequencies(ours(parameters, 1.0))[0] for name, parameters in CASES.items() if "given" not in name}
    assert len({*found.values(), frequencies(Rope(theta=1e6, dims=128))[0]}) == len(found) + 1


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dims", [16, 8], ids=["whole head", "half of the head"])
def test_heads_turn_as_in_transformers(interleaved: bool, dims: int) -> None:
    heads = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0))
    table = rotation_table(Rope(theta=50.0, dims=dims, interleaved=interleaved), POSITIONS, dtype=torch.float32)
    plain = rotation_table(Rope(theta=50.0, dims=dims), POSITIONS, dtype=torch.float32)
    theirs = turn_interleaved if interleaved else turn_halves
    expected, _ = theirs(heads, heads, plain.cos, plain.sin)
    torch.testing.assert_close(rotate(heads, *table), expected, rtol=0.0, atol=1e-6)
    other, _ = (turn_halves if interleaved else turn_interleaved)(heads, heads, plain.cos, plain.sin)
    assert float((rotate(heads, *table) - other).abs().max()) > 0.1


def test_sections_change_nothing_for_text() -> None:
    assert frequencies(Rope(theta=50.0, dims=16, sections=(4, 2, 2)))[0] == frequencies(Rope(theta=50.0, dims=16))[0]
