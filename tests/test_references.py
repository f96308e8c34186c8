"""Reference files: what is written is read back, and anything else is refused by file and line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_model.errors import InputError, StorageError
from dflash_model.served import Served
from dflash_model.target.references import Reference, read_references, reference_key, write_references

REFERENCE = Reference(
    sample_id="a",
    prompt_ids=(5, 6),
    completion_ids=(7, 2),
    overshoot_ids=(9,),
    finish="stop",
    logprobs=(-0.25, 0.0),
    engine="transformers",
)


def _tampered(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "r.jsonl"
    write_references(path, [REFERENCE])
    data = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None and name != "logprobs":
            del data[name]
        else:
            data[name] = value
    path.write_text(json.dumps(data) + "\n")
    return path


def test_references_survive_the_file(tmp_path: Path) -> None:
    second = replace(REFERENCE, sample_id="b", finish="length", logprobs=None, overshoot_ids=())
    write_references(tmp_path / "r.jsonl", [REFERENCE, second])
    assert read_references(tmp_path / "r.jsonl") == [REFERENCE, second]


def test_the_tokens_to_extract_are_prompt_and_completion_without_overshoot() -> None:
    assert REFERENCE.token_ids == (5, 6, 7, 2)
    assert REFERENCE.stopped
    assert REFERENCE.token_digest == replace(REFERENCE, overshoot_ids=()).token_digest
    assert REFERENCE.token_digest != replace(REFERENCE, completion_ids=(7, 3)).token_digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, "format_version 3, expected 2"),
        ({"completion_ids": []}, "completion is empty"),
        ({"completion_ids": [7, -2]}, "whole numbers"),
        ({"completion_ids": [7, 2.0]}, "whole numbers"),
        ({"completion_ids": "72"}, "completion_ids is not a list"),
        ({"prompt_ids": []}, "non-empty prompt"),
        ({"finish": "eos"}, "finish 'eos'"),
        ({"logprobs": [-0.1]}, "1 logprobs for 2 completion tokens"),
        ({"logprobs": [-0.1, 0.1]}, "finite and <= 0"),
        ({"logprobs": [-0.1, float("nan")]}, "finite and <= 0"),
        ({"engine": None}, "engine"),
        ({"token_source": "guess"}, "token source 'guess'"),
        (
            {"served": {"tokens": 4, "verify_steps": 0, "accepted": 1, "drafted": 2, "accept_length": 1.0, "raw": {}}},
            "served: 4 tokens",
        ),
        ({"served": {"tokens": 4}}, "verify_steps"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StorageError, match=rf"r\.jsonl:1 is not a reference: .*{message}"):
        read_references(_tampered(tmp_path, **changes))


def test_version_1_is_read_as_token_ids_without_counters(tmp_path: Path) -> None:
    path = _tampered(tmp_path, format_version=1, token_source=None, served=None)
    assert {"token_source", "served"}.isdisjoint(json.loads(path.read_text()))
    assert read_references(path) == [REFERENCE]


def test_counters_of_a_server_survive_the_file(tmp_path: Path) -> None:
    served = Served(tokens=2, verify_steps=1, accepted=0, drafted=7, accept_length=2.0, raw={"spec_verify_ct": 1})
    given = replace(REFERENCE, served=served, token_source="text", overshoot_ids=())
    write_references(tmp_path / "r.jsonl", [given])
    assert read_references(tmp_path / "r.jsonl") == [given]


def test_a_missing_an_empty_and_a_doubled_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Not found"):
        read_references(tmp_path / "absent.jsonl")
    (tmp_path / "r.jsonl").write_text("")
    with pytest.raises(StorageError, match=r"r\.jsonl:1 is not a reference"):
        read_references(tmp_path / "r.jsonl")
    write_references(tmp_path / "r.jsonl", [REFERENCE, REFERENCE])
    with pytest.raises(StorageError, match=r"r\.jsonl:2 .*twice"):
        read_references(tmp_path / "r.jsonl")


def test_the_key_changes_with_all_that_decides_the_tokens_and_with_nothing_else() -> None:
    base: dict[str, Any] = {
        "max_new_tokens": 8, "overshoot_tokens": 2, "stop_ids": (2, 3), "engine": "transformers", "dtype": "float32",
    }  # fmt: skip
    key = reference_key((5, 6), "t", **base)
    assert reference_key([5, 6], "t", **(base | {"stop_ids": [3, 2]})) == key
    others = [reference_key((5, 7), "t", **base), reference_key((5, 6), "u", **base)]
    changes = {"max_new_tokens": 9, "overshoot_tokens": 3, "stop_ids": (2,), "engine": "sglang", "dtype": "bfloat16"}
    others += [reference_key((5, 6), "t", **(base | {name: value})) for name, value in changes.items()]
    assert len({key, *others}) == 8
