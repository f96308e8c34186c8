"""drafter/policies.py: masks per layer from z-lab's keys."""

from typing import Any

import pytest

from dflash_model.drafter.claims import Source
from dflash_model.drafter.policies import LayerMasks, read_layer_masks, whole_context
from dflash_model.drafter.spec import MaskPolicy
from dflash_model.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
SLIDES: dict[str, Any] = {"layer_types": [SLIDING, FULL], "sliding_window": 12, "use_sliding_window": True}


def masks(**values: Any) -> LayerMasks | None:
    claim = read_layer_masks(Source(label="c", values=values), num_layers=2)
    return claim.value if claim else None


def policy(in_block: str, window: int | None = None) -> MaskPolicy:
    return MaskPolicy(in_block=in_block, window=window)


def test_nothing_stated_is_none_and_full_layers_are_plain_dflash() -> None:
    assert masks() is None
    assert masks(sliding_window=4096) is None
    assert masks(layer_types=[FULL, FULL]) == whole_context(2)
    assert masks(use_sliding_window=False, sliding_window=4096) == whole_context(2)
    assert masks(layer_types=[FULL, FULL], use_sliding_window=True, sliding_window=4096) == whole_context(2)


def test_a_sliding_layer_is_causal_in_the_block_with_a_window_per_query() -> None:
    found = masks(**SLIDES)
    assert found == (policy("causal", 12), policy("bidirectional"))
    assert found[0].window_origin == "query"


@pytest.mark.parametrize("where", [{"is_causal": False}, {"dflash_config": {"causal": False}}, {"causal": False}])
def test_a_stated_causality_holds_for_every_layer(where: dict[str, Any]) -> None:
    assert masks(**SLIDES, **where) == (policy("bidirectional", 12), policy("bidirectional"))


def test_is_causal_true_makes_full_layers_causal_too() -> None:
    assert masks(**SLIDES, is_causal=True) == (policy("causal", 12), policy("causal"))
    assert masks(is_causal=True) == (policy("causal"), policy("causal"))


def test_the_place_names_the_keys_that_decided() -> None:
    claim = read_layer_masks(Source(label="c", values=SLIDES | {"is_causal": False}), num_layers=2)
    assert claim is not None
    assert claim.place == "c layer_types, c is_causal"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            SLIDES | {"is_causal": True, "dflash_config": {"causal": False}},
            "c is_causal is True, but c dflash_config.causal is False",
        ),
        (SLIDES | {"is_causal": 1}, "is_causal is 1, expected true or false"),
        (SLIDES | {"use_sliding_window": None}, "c has no use_sliding_window"),
        (SLIDES | {"use_sliding_window": False}, "c use_sliding_window is false"),
        (SLIDES | {"sliding_window": None}, "c gives no sliding_window"),
        (SLIDES | {"sliding_window": 0}, "c gives no sliding_window of at least 1"),
        (SLIDES | {"dflash_config": {"swa_window_size": 13}}, "sliding_window is 12, but c dflash_config.swa_window_size is 13"),
        (SLIDES | {"layer_types": [SLIDING]}, "lists 1 layers, but the weights hold 2"),
        (SLIDES | {"layer_types": [SLIDING, "chunked_attention"]}, "expected a list of full_attention and sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 12}, "use_sliding_window is true, but c has no layer_types"),
        ({"layer_types": [FULL, FULL], "dflash_config": {"use_swa": True}}, "use_swa is true, but no entry of layer_types"),
        (SLIDES | {"sliding_window_non_causal": True}, "sliding_window_non_causal is True, but .* sliding layers causal"),
    ],
)
def test_what_implementations_read_differently_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        masks(**values)


def test_agreeing_double_statements_pass() -> None:
    agreeing = SLIDES | {"dflash_config": {"swa_window_size": 12, "use_swa": True, "causal": False}, "is_causal": False}
    assert masks(**agreeing, sliding_window_non_causal=True) == (policy("bidirectional", 12), policy("bidirectional"))
