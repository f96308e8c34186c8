"""Configs of training runs: every wrong value has its sentence, and its healthy neighbour passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dflash_model.errors import ConfigError
from dflash_model.training.batches import BatchPlan
from dflash_model.training.config import parse_config, read_config
from dflash_model.training.faults import FAULTS
from dflash_model.training.optimizers import rate_share
from tests.training_runs import made_up_references

GOOD: dict[str, Any] = {
    "target": "t", "data": "d", "out": "o", "steps": 5, "drafter": {"target_layer_ids": [1, 2], "mask_token_id": 3},
}  # fmt: skip
SLIDING = {"target_layer_ids": [1], "mask_token_id": 3, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"stepps": 5}, "stepps is no key of a training config"),
        ({"drafter": {"mask_token_id": 3}}, "lacks drafter.target_layer_ids"),
        ({"drafter": {"target_layer_ids": [1], "mask_token_id": 3, "heads": 4}}, "drafter.heads is no key"),
        ({"steps": "five"}, "steps is 'five'"),
        ({"steps": True}, "steps is True"),
        ({"steps": 0}, "steps, save_every and log_every does not fit"),
        ({"drafter": {"target_layer_ids": ["a"], "mask_token_id": 3}}, "drafter.target_layer_ids is 'a'"),
        ({"drafter": SLIDING}, "drafter.sliding_window does not fit"),
        ({"drafter": SLIDING | {"layer_types": ["sliding_attention"], "sliding_window": 4}}, "drafter.layer_types does not fit"),
        ({"drafter": SLIDING | {"layer_types": ["linear", "linear"]}}, "drafter.layer_types does not fit"),
        ({"drafter": GOOD["drafter"] | {"num_heads": 3}}, "drafter.num_heads does not fit"),
        ({"drafter": GOOD["drafter"] | {"block_size": 1}}, "drafter does not fit"),
        ({"batch": {"lengths": [64, 32]}}, "batch.lengths does not fit"),
        ({"batch": {"anchor_rule": "all"}}, "batch.anchor_rule does not fit"),
        ({"batch": {"noise": -1.0}}, "batch does not fit"),
        ({"loss": {"labels": "hard"}}, "loss: 'hard', expected one of"),
        ({"loss": {"gamma": 0.0}}, "loss: gamma 0.0"),
        ({"pipeline": {"attention": "eager"}}, "pipeline.attention does not fit"),
        ({"pipeline": {"attention": "flex"}}, "flex_attention has no gradient on a CPU"),
        ({"pipeline": {"target_devices": []}}, "pipeline does not fit"),
        ({"pipeline": {"drafter_devices": ["cpu"] * 7}}, "pipeline.drafter_devices does not fit"),
        ({"fault": "labels"}, "fault does not fit"),
        ({"fault": "soft_labels_shifted"}, "needs labels of the verifier"),
        ({"fault": "noise_on_labels", "loss": {"labels": "verifier"}}, "needs noise"),
        ({"batch": 5}, "batch. is 5"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_with_its_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(GOOD | change, base=Path("/base"))
    assert sentence in caught.value.problem
    assert caught.value.fix


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"drafter": SLIDING | {"sliding_window": 4}},
        {"drafter": GOOD["drafter"] | {"num_heads": 6}},
        {"batch": {"lengths": [32, 64], "noise": 0}},
        {"loss": {"gamma": None}},
        {"pipeline": {"attention": "flex", "drafter_devices": ["cuda:0"]}},
        {"fault": "soft_labels_shifted", "loss": {"labels": "verifier"}},
        {"fault": "noise_on_labels", "loss": {"labels": "verifier"}, "batch": {"noise": 0.1}},
    ],
    ids=str,
)
def test_its_healthy_neighbour_passes(change: dict[str, Any]) -> None:
    config = parse_config(GOOD | change, base=Path("/base"))
    assert config.target == Path("/base/t")


def test_a_file_that_is_no_yaml_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="is not YAML"):
        read_config(tmp_path / "bad.yaml")
    with pytest.raises(Exception, match="Not found"):
        read_config(tmp_path / "none.yaml")


def test_every_fault_says_what_it_is_and_changes_something() -> None:
    plain = type(FAULTS["labels_shifted"])(what="")
    assert len(FAULTS) == 9
    for fault in FAULTS.values():
        assert fault.what
        assert {name: getattr(fault, name) for name in fault.__slots__ if name != "what"} != {
            name: getattr(plain, name) for name in plain.__slots__ if name != "what"
        }


def plan(**changes: Any) -> BatchPlan:
    options = {"lengths": [16, 20, 32], "sequences": 4, "seed": 0, "pad_id": 0} | changes
    return BatchPlan(made_up_references(), **options)


def test_an_epoch_sees_every_sequence_in_few_shapes() -> None:
    ours, references = plan(), made_up_references()
    seen: set[int] = set()
    for step in range(ours.per_epoch):
        length, members = ours.members(step)
        batch = ours.batch(step)
        seen |= set(members)
        assert len(members) == 4
        assert batch.token_ids.shape == (4, length)
        assert length in (16, 20, 32)
        for row, index in enumerate(members):
            reference = references[index]
            size = len(reference.token_ids)
            assert batch.token_ids[row].tolist() == [*reference.token_ids, *[0] * (length - size)]
            assert batch.supervised[row].nonzero().flatten().tolist() == list(range(len(reference.prompt_ids), size))
            assert batch.documents[row].tolist() == [0] * size + [-1] * (length - size)
    assert seen == set(range(12))


def test_step_and_seed_decide_a_batch_and_nothing_else() -> None:
    ours, again = plan(), plan()
    late = [ours.members(step) for step in (17, 3, 17)]
    assert late[0] == late[2] == again.members(17)
    assert [plan(seed=1).members(step) for step in range(6)] != [ours.members(step) for step in range(6)]
    first = [ours.members(step) for step in range(ours.per_epoch)]
    second = [ours.members(step + ours.per_epoch) for step in range(ours.per_epoch)]
    assert first != second


def test_a_sequence_that_fits_no_shape_is_named() -> None:
    with pytest.raises(ConfigError, match=r"s\d+ has \d+ tokens, more than batch.lengths' largest, 10"):
        plan(lengths=[10])
    with pytest.raises(ConfigError, match="no sequence"):
        BatchPlan([], lengths=[8], sequences=1, seed=0, pad_id=0)


def test_the_rate_rises_linearly_then_falls_to_its_share() -> None:
    shares = [rate_share(number, 11, warmup=2, final=0.2) for number in range(11)]
    assert shares[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert shares[6] == pytest.approx(0.6)
    assert shares[-1] == pytest.approx(0.2)
