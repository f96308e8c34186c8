"""A fingerprint tells targets apart, names what differs, and does not change with where the files lie."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_model.errors import CheckpointError, InputError
from dflash_model.target.fingerprint import TargetFingerprint, fingerprint
from tests.tiny_targets import DEMO_TARGET


def _copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_TARGET, tmp_path / "copy"))


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_copy_has_the_same_fingerprint(tmp_path: Path) -> None:
    original, copy = fingerprint(DEMO_TARGET), fingerprint(_copy(tmp_path))
    assert copy == original
    assert copy.digest == original.digest
    assert original.differences(copy) == ()
    assert set(original.weights) == {"config.json", "model.safetensors"}
    assert set(original.text) == {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize("offset", [20, -1], ids=["header", "last byte"])
def test_a_changed_shard_is_named_and_changes_the_weights_digest(tmp_path: Path, offset: int) -> None:
    copy = _copy(tmp_path)
    original = fingerprint(copy)
    path = copy / "model.safetensors"
    if offset == 20:
        path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"tp"', 1))
    else:
        _flip(path, offset)
    changed = fingerprint(copy)
    assert original.differences(changed) == ("model.safetensors differs",)
    assert changed.weights_digest != original.weights_digest


def test_a_changed_tokenizer_leaves_the_weights_digest_alone(tmp_path: Path) -> None:
    copy = _copy(tmp_path)
    original = fingerprint(copy)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    (copy / "generation_config.json").unlink()
    changed = fingerprint(copy)
    assert original.differences(changed) == ("chat_template.jinja is missing here", "generation_config.json is missing there")
    assert changed.weights_digest == original.weights_digest
    assert changed.digest != original.digest


def test_a_change_inside_one_small_tensor_of_a_large_shard_shows(tmp_path: Path) -> None:
    """The small tensor lies between the evenly spaced blocks: only the sample of every tensor can see it."""
    (tmp_path / "config.json").write_text("{}")
    big = np.zeros(3_000_000, dtype=np.float32)
    small = np.ones(64, dtype=np.float32)
    path = tmp_path / "model.safetensors"
    save_file({"a": big, "b": small, "c": big[:1_900_000]}, path)
    before = fingerprint(tmp_path)
    save_file({"a": big, "b": small * 2, "c": big[:1_900_000]}, path)
    assert before.differences(fingerprint(tmp_path)) == ("model.safetensors differs",)


def test_a_config_alone_or_a_missing_shard_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="holds no weights"):
        fingerprint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "one.safetensors"}}))
    with pytest.raises(InputError, match=r"one\.safetensors"):
        fingerprint(tmp_path)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    copy = _copy(tmp_path)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        fingerprint(copy)


def test_it_survives_json_and_a_tampered_one_is_refused() -> None:
    original = fingerprint(DEMO_TARGET)
    data = json.loads(json.dumps(original.to_json()))
    assert TargetFingerprint.from_json(data) == original
    data["weights"]["config.json"] = "0" * 64
    with pytest.raises(ValueError, match="does not match"):
        TargetFingerprint.from_json(data)


def test_identity_prompts_and_references_are_read_without_torch() -> None:
    modules = "fingerprint, model_directory, prompts, references"
    program = (
        f"import sys; from dflash_model.target import {modules}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
