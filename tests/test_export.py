"""drafter/export.py: a spec written in a public form is read back to the same spec, or refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_model.drafter.export import speculators_config, speculators_names, zlab_config
from dflash_model.drafter.geometry import geometry_of
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.drafter.speculators import read_speculators
from dflash_model.drafter.zlab import read_zlab
from dflash_model.errors import ConfigError
from tests.tiny_drafters import DFLASH2, FULL, ROPES, SPEC
from tests.tiny_drafters import zlab_config as published_config

CAUSAL = MaskPolicy(in_block="causal")
SLIDING = MaskPolicy(in_block="causal", window=7)
FREE = MaskPolicy(in_block="bidirectional", window=7)
ANCHORED = MaskPolicy(in_block="causal", window=7, window_origin="anchor")
ANCHORED_FREE = replace(ANCHORED, in_block="bidirectional")

SPECS: dict[str, DrafterSpec] = {
    "plain": SPEC,
    "shifted": replace(SPEC, shift=1),
    "biased": replace(SPEC, attention_bias=True),
    "DFlash2": DFLASH2,
    "own tables": replace(SPEC, owns_embedding=True, owns_head=True),
    "own head alone": replace(SPEC, owns_head=True),
    "reduced": replace(SPEC, owns_head=True, draft_vocab_size=20),
    "mask embedding": replace(SPEC, mask_embedding=True),
    "scaled": replace(SPEC, input_embedding_scale=2.5, output_multiplier=0.5, final_logit_softcapping=30.0),
    "last layer": replace(SPEC, tap_indices=(1, 4, 6)),
    **{f"rope {name}": replace(SPEC, rope=rope) for name, rope in ROPES.items()},
    "sections": replace(SPEC, rope=Rope(theta=100.0, dims=8, sections=(2, 1, 1))),
}


def neutral(spec: DrafterSpec) -> DrafterSpec:
    return replace(spec, source_format="zlab", provenance={})


def through_zlab(spec: DrafterSpec) -> DrafterSpec:
    reading = read_zlab(zlab_config(spec), geometry_of(spec).tensor_shapes())
    assert reading.warnings == ()
    assert reading.spec.source_format == "zlab"
    return reading.spec


def through_speculators(spec: DrafterSpec) -> DrafterSpec:
    reading = read_speculators(speculators_config(spec), geometry_of(spec).tensor_shapes())
    assert reading.warnings == ()
    assert reading.spec.source_format == "speculators"
    return reading.spec


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_zlab_and_speculators_say_the_same_and_back(spec: DrafterSpec) -> None:
    there = through_speculators(through_zlab(spec))
    assert neutral(there) == neutral(spec)
    assert neutral(through_zlab(there)) == neutral(spec)


@pytest.mark.parametrize(
    "masks", [(SLIDING, FULL), (FREE, FREE), (FREE, FULL), (CAUSAL, CAUSAL), (SLIDING, CAUSAL), (FULL, FULL)]
)
def test_zlabs_masks_come_back(masks: tuple[MaskPolicy, ...]) -> None:
    spec = replace(SPEC, layer_masks=masks)
    assert neutral(through_zlab(spec)) == neutral(spec)


@pytest.mark.parametrize("masks", [(ANCHORED, FULL), (ANCHORED_FREE, FULL), (ANCHORED, ANCHORED), (FULL, FULL)])
def test_speculators_masks_come_back(masks: tuple[MaskPolicy, ...]) -> None:
    spec = replace(SPEC, layer_masks=masks)
    assert neutral(through_speculators(spec)) == neutral(spec)


def test_a_published_config_goes_through_both_forms() -> None:
    published = published_config(
        dflash_config={"causal": True, "output_multiplier": 0.5}, rope_theta=..., rope_parameters={"rope_theta": 7.0, "rope_type": "default"}
    )  # fmt: skip
    read = read_zlab(published, geometry_of(SPEC).tensor_shapes()).spec
    assert neutral(through_zlab(read)) == neutral(read)
    full = replace(read, layer_masks=(FULL, FULL))
    assert neutral(through_speculators(full)) == neutral(full)


@pytest.mark.parametrize(
    ("change", "write", "message"),
    [
        ({"tap_indices": (0, 4, 5)}, zlab_config, "a tap of the embedding's output, which a config in z-lab's form"),
        ({"layer_masks": (ANCHORED, FULL)}, zlab_config, "a window measured from the anchor"),
        ({"layer_masks": (SLIDING, replace(SLIDING, window=9))}, zlab_config, "several windows"),
        ({"layer_masks": (FREE, CAUSAL)}, zlab_config, "full layers that are causal beside sliding ones that are not"),
        ({"layer_masks": (SLIDING, FULL)}, speculators_config, "a window of each query, which a config in speculators' form"),
        ({"layer_masks": (CAUSAL, FULL)}, speculators_config, "full layers that are causal"),
        ({"layer_masks": (ANCHORED, ANCHORED_FREE)}, speculators_config, "several windows"),
        ({"vocab_size": None}, speculators_config, "an unknown vocabulary"),
    ],
)
def test_what_a_form_cannot_say_is_refused_by_name(change: dict[str, Any], write: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        write(replace(SPEC, **change))


def test_a_tap_of_the_embedding_goes_through_speculators() -> None:
    spec = replace(SPEC, tap_indices=(0, 4, 5))
    assert neutral(through_speculators(spec)) == neutral(spec)


def test_only_codebooks_are_called_otherwise_in_speculators() -> None:
    names = speculators_names(geometry_of(DFLASH2).tensor_shapes())
    assert {name: other for name, other in names.items() if name != other} == {
        "candidate_selector.predecessor_codebook": "candidate_selector.predecessor_codebook.weight",
        "candidate_selector.successor_codebook": "candidate_selector.successor_codebook.weight",
    }
