"""A bundle of a real run: replays equal from the file alone, says what differs, and asks for what it leaves out."""

import json
import os
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dflash_model.errors import InputError
from dflash_model.replay.records import SampleRecords
from flows.bundling import bundle, replay
from flows.parameters import DrafterSource, EvaluateParameters, References, TargetSource
from tasks.bundle import compare_records
from tests.made_up_records import hand_records

pytestmark = pytest.mark.engine
DEMO = Path(__file__).resolve().parent.parent / "deployments" / "demo"


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Commands set Prefect's variables; put back what was there."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, prefect_api: None) -> Path:
    """A finished run of two prompts and one drafter, in two shards."""
    from flows.evaluate import evaluate

    base = tmp_path_factory.mktemp("bundle")
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:3]
    (base / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    evaluate(
        EvaluateParameters(
            home=str(base / "home"),
            candidates=[DrafterSource(path=str(DEMO / "drafters" / "step-00110"))],
            target=TargetSource(path=str(DEMO / "target")),
            prompts=str(base / "prompts.jsonl"),
            references=References(max_new_tokens=16),
            shards=2,
            deadline_s=300,
        )
    )
    return base / "home"


def rewritten(path: Path, change: str, content: bytes) -> Path:
    """A copy of the bundle with one file replaced."""
    other = path.with_name("other.zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name == change else old.read(name))
    return other


def test_a_bundle_replays_equal_from_the_file_alone(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "b.zip"
    assert bundle("latest", home=home, prompts=2, destination=path, weights=True) == 0
    hidden = home.with_name("hidden")
    home.rename(hidden)
    try:
        assert replay(path, files=[]) == 0
    finally:
        hidden.rename(home)
    assert "equal: all 2" in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.zip"]
    with zipfile.ZipFile(path) as archive:
        told = json.loads(archive.read("bundle.json"))
        assert (len(told["prompts"]), [row["name"] for row in told["drafters"]]) == (2, ["step-00110"])
        assert "torch" in told["about"]["versions"]
        name = "records/0/000001.safetensors"
        archive.extract(name, tmp_path)
    # One drafted token of one record changed: the replay says so, and fails.
    records = SampleRecords.load(tmp_path / name)
    top_ids = records.top_ids.copy()
    top_ids[0, 0, 0] = 1 if top_ids[0, 0, 0] != 1 else 2
    replace(records, top_ids=top_ids).save(tmp_path / "changed.safetensors")
    assert replay(rewritten(path, name, (tmp_path / "changed.safetensors").read_bytes()), files=[]) == 3
    assert "1 drafted tokens differ" in capsys.readouterr().out


def test_left_out_weights_are_asked_for_by_digest_and_taken_when_given(home: Path, tmp_path: Path) -> None:
    path, whole = tmp_path / "b.zip", tmp_path / "whole"
    bundle("latest", home=home, prompts=1, destination=path, weights=False)
    with pytest.raises(InputError, match=r"does not hold .*model.safetensors \(sha256 [0-9a-f]{64}") as caught:
        replay(path, files=[])
    assert "--file" in caught.value.fix
    files = [*home.glob("here/artifacts/*/model.safetensors"), *home.glob("here/artifacts/*/tables.safetensors")]
    shutil.copytree(files[0].parent, whole)
    assert replay(path, files=files) == 0


def test_what_is_no_bundle_or_no_finished_run_is_said(home: Path, tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(b"rubbish")
    with pytest.raises(InputError, match="is not a bundle"):
        replay(tmp_path / "x.zip", files=[])
    with pytest.raises(InputError, match="There is no run nothing"):
        bundle("nothing", home=home, prompts=1, destination=tmp_path / "y.zip", weights=True)
    assert not (tmp_path / "y.zip").exists()


def test_records_differ_by_anchors_steps_tokens_or_probabilities() -> None:
    then = hand_records("s", [[0, 0, 9]] * 5, completion=6)
    assert compare_records("d", then, then).fault is None
    assert compare_records("d", then, then.at([0, 1])).fault == "other anchors were visited"
    ranks = then.true_rank.copy()
    ranks[0, 0] = 9
    assert compare_records("d", then, replace(then, true_rank=ranks)).fault == "the chain's steps differ"
    ids = then.top_ids.copy()
    ids[1, :2, 0] = 7
    assert compare_records("d", then, replace(then, top_ids=ids)).fault == "2 drafted tokens differ"
    near = replace(then, true_logprob=then.true_logprob + np.float32(5e-4))
    far = replace(then, true_logprob=then.true_logprob + np.float32(5e-3))
    assert compare_records("d", then, near).fault is None
    assert compare_records("d", then, far).fault == "log-probabilities differ by up to 0.005 nats"
