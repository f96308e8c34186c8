"""drafter/support.py: what the backbone cannot apply is refused by name before any weight is read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.spec import Rope
from dflash_model.drafter.support import unsupported
from dflash_model.errors import ConfigError
from tests.tiny_drafters import SPEC

YARN = (
    ("attention_factor", 1.2),
    ("beta_fast", 32.0),
    ("beta_slow", 1.0),
    ("factor", 4.0),
    ("original_max_position_embeddings", 64.0),
    ("truncate", 1.0),
)


def test_what_the_backbone_runs_passes() -> None:
    assert unsupported(SPEC) == []
    assert unsupported(replace(SPEC, shift=1, rope=Rope(theta=5.0, dims=4, sections=(1, 1)))) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"family": "dflash2", "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3},
            "the DFlash2 family",
        ),
        ({"rope": Rope(theta=5.0, dims=8, type="yarn", scaling=YARN)}, "RoPE of type 'yarn'"),
        ({"rope": Rope(theta=5.0, dims=8, interleaved=True)}, "interleaved RoPE"),
        ({"owns_embedding": True}, "an embedding of its own"),
        ({"owns_head": True}, "a head of its own"),
        ({"owns_head": True, "draft_vocab_size": 20}, "a head of its own, a reduced vocabulary"),
        ({"mask_embedding": True}, "a mask embedding"),
        ({"input_embedding_scale": 4.9}, "input_embedding_scale 4.9"),
        ({"output_multiplier": 0.5}, "output_multiplier 0.5"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    ],
)
def test_each_lack_is_named_and_nothing_is_loaded(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"/nowhere/a\.safetensors needs .*{message}.*, which cannot be run yet\."):
        load_drafter(Path("/nowhere/a.safetensors"), replace(SPEC, **change))
