"""Drafters where training left them: the newest complete one, known by content, moved whole or not at all."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.errors import CheckpointError, InputError
from tasks.remote.drafters import (
    DIRECTORY,
    TORCH,
    RemoteDrafter,
    discover,
    read_config,
)
from tasks.remote.local import LocalHost

OLD_NS = 10**18


@pytest.fixture
def train(tmp_path: Path) -> LocalHost:
    return LocalHost("train", tmp_path / "train", threads=1, slots=1)


@pytest.fixture
def evaluator(tmp_path: Path) -> LocalHost:
    return LocalHost("eval", tmp_path / "eval", threads=1, slots=1)


def save(host: LocalHost, name: str, *, value: float = 1.0, step: int = 7, age: int = 0) -> Path:
    """A small training file, last changed long ago (the larger `age`, the longer)."""
    path = Path(host.work_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model_state_dict": {"fc.weight": torch.full((64, 64), value)}, "step": step}, path)
    os.utime(path, ns=(OLD_NS - age, OLD_NS - age))
    return path


def find(host: LocalHost, pattern: str) -> RemoteDrafter:
    return discover(host, pattern, settle_s=0.3)


def test_the_newest_match_is_described_with_step_and_size(train: LocalHost) -> None:
    save(train, "step-1.pt", step=1, age=2)
    newest = save(train, "step-2.pt", step=2, age=1)
    found = find(train, "step-*.pt")
    assert (found.name, found.form, found.step, found.host) == ("step-2", TORCH, 2, "train")
    assert found.size_bytes == newest.stat().st_size
    assert RemoteDrafter.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_content_alone_makes_the_identity(train: LocalHost, evaluator: LocalHost) -> None:
    save(train, "a.pt")
    (Path(evaluator.work_dir) / "deep").mkdir(parents=True)
    shutil.copyfile(Path(train.work_dir) / "a.pt", Path(evaluator.work_dir) / "deep" / "other name.pt")
    one, same = find(train, "a.pt"), find(evaluator, "deep/other name.pt")
    save(train, "b.pt", value=2.0)
    assert one.digest == same.digest
    assert find(train, "b.pt").digest != one.digest


def test_a_file_that_still_grows_is_passed_over(train: LocalHost) -> None:
    save(train, "step-1.pt", step=1, age=5)
    fresh = save(train, "step-2.pt", step=2)
    os.utime(fresh)
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(0.05):
            os.utime(fresh)

    writer = threading.Thread(target=touch)
    writer.start()
    try:
        assert find(train, "step-*.pt").step == 1
        with pytest.raises(CheckpointError, match=r"step-2\.pt: it is still being written"):
            find(train, "step-2.pt")
    finally:
        stop.set()
        writer.join()
    time.sleep(0.01)
    assert find(train, "step-*.pt").step == 2


def test_a_truncated_newest_file_is_passed_over_and_named_when_alone(train: LocalHost) -> None:
    save(train, "step-1.pt", step=1, age=5)
    cut = save(train, "step-2.pt", step=2)
    cut.write_bytes(cut.read_bytes()[:-200])
    os.utime(cut, ns=(OLD_NS, OLD_NS))
    assert find(train, "step-*.pt").step == 1
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*step-2\.pt has no zip end record"):
        find(train, "step-2.pt")
    with pytest.raises(CheckpointError, match="nothing matches none"):
        find(train, "none*.pt")


def directory_drafter(host: LocalHost, name: str, *, tokenizer: str | None = None) -> Path:
    path = Path(host.work_dir) / name
    path.mkdir(parents=True)
    save_file({"fc.weight": torch.ones(4, 4)}, path / "model.safetensors")
    (path / "config.json").write_text('{"block_size": 8}')
    (path / "README.md").write_text("not moved")
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(tokenizer)
    return path


def test_a_directory_is_known_by_its_weights_and_config_and_its_tokenizer_is_remembered(train: LocalHost) -> None:
    directory_drafter(train, "plain [1]")
    directory_drafter(train, "with", tokenizer="{}")
    plain, with_tokenizer = find(train, "plain*"), find(train, "with")
    assert (plain.form, plain.digest, plain.tokenizer_sha256) == (DIRECTORY, with_tokenizer.digest, None)
    assert with_tokenizer.tokenizer_sha256 is not None
    assert [name for name, _ in plain.files] == ["config.json", "model.safetensors"]
    (Path(train.work_dir) / "with" / "config.json").write_text('{"block_size": 9}')
    assert find(train, "with").digest != plain.digest


def test_a_config_that_is_no_object_is_a_sentence(train: LocalHost) -> None:
    for content, sentence in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        train.write_blocks(train.work_dir / "config.json", [content.encode()])
        with pytest.raises(InputError, match=sentence):
            read_config(train, train.work_dir / "config.json")
