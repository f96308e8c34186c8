"""Names for content."""

import hashlib
import math
from pathlib import Path

import pytest

from dflash_model.digests import canonical_json, file_digest, json_digest, stage_key


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical_json({"b": [1, 2], "a": "ü"}) == '{"a":"ü","b":[1,2]}'.encode()
    assert json_digest({"x": 1, "y": 2}) == json_digest({"y": 2, "x": 1})
    assert json_digest([1, 2]) != json_digest([2, 1])


def test_canonical_json_refuses_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"x": math.nan})


def test_file_digest_is_sha256_of_the_bytes(tmp_path: Path) -> None:
    content = b"abc" * 1_000_000
    (tmp_path / "f").write_bytes(content)
    assert file_digest(tmp_path / "f") == hashlib.sha256(content).hexdigest()


def test_a_stage_key_changes_with_stage_version_inputs_and_parameters() -> None:
    base = stage_key("replay", 1, {"states": "aa"}, {"k": 1})
    assert base.startswith("replay-v1-")
    others = {
        stage_key("compare", 1, {"states": "aa"}, {"k": 1}),
        stage_key("replay", 2, {"states": "aa"}, {"k": 1}),
        stage_key("replay", 1, {"states": "ab"}, {"k": 1}),
        stage_key("replay", 1, {"states": "aa"}, {"k": 2}),
        stage_key("replay", 1, {"tables": "aa"}, {"k": 1}),
    }
    assert len(others | {base}) == 6
    assert base == stage_key("replay", 1, {"states": "aa"}, {"k": 1})
