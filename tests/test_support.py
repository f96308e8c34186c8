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

SCALING = (("factor", 2.0),)
DFLASH2 = {"family": "dflash2", "conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 3}


def test_what_the_backbone_runs_passes() -> None:
    assert unsupported(SPEC) == []
    assert unsupported(replace(SPEC, shift=1, rope=Rope(theta=5.0, dims=4, sections=(1, 1), interleaved=True))) == []
    assert unsupported(replace(SPEC, rope=Rope(theta=5.0, dims=8, type="linear", scaling=SCALING))) == []
    assert unsupported(replace(SPEC, **DFLASH2)) == []  # type: ignore[arg-type]
    assert unsupported(replace(SPEC, owns_embedding=True, owns_head=True, draft_vocab_size=20, mask_embedding=True)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (DFLASH2 | {"owns_head": True, "draft_vocab_size": 20}, "a candidate selector over a reduced vocabulary"),
        (DFLASH2 | {"conv_group_size": 7}, "groups of 7 channels, which do not divide hidden size 24"),
    ],
)
def test_each_lack_is_named_and_nothing_is_loaded(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"/nowhere/a\.safetensors needs .*{message}.*, which cannot be run yet\."):
        load_drafter(Path("/nowhere/a.safetensors"), replace(SPEC, **change))
