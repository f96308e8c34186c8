"""Manifest-last directories: whole or not there."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_model.artifacts import Manifest
from dflash_model.errors import EvalError, InputError, StorageError
from dflash_model.parts import part_name
from dflash_model.storage import (
    artifacts_dir,
    find_artifact,
    read_json,
    read_manifest,
    sweep,
    verify_artifact,
    write_file,
    write_json,
    writing_artifact,
)


def make(work_dir: Path, key: str, content: bytes = b"data", **parts: str) -> Manifest:
    with writing_artifact(work_dir, kind="thing", key=key) as writer:
        (writer.path / "file.bin").write_bytes(content)
        writer.facts["n"] = len(content)
        writer.parts |= parts
    manifest = find_artifact(work_dir, key)
    assert manifest is not None
    return manifest


def test_an_artifact_is_found_with_its_files_and_facts(tmp_path: Path) -> None:
    manifest = make(tmp_path, "k", b"12345")
    assert [(f.name, f.size_bytes) for f in manifest.files] == [("file.bin", 5)]
    assert manifest.facts == {"n": 5}
    assert manifest.size_bytes == 5
    assert os.listdir(artifacts_dir(tmp_path)) == ["k"]  # noqa: PTH208


def test_the_digest_covers_content_and_nothing_else(tmp_path: Path) -> None:
    one = make(tmp_path / "a", "k")
    with writing_artifact(tmp_path / "b", kind="thing", key="k") as writer:
        (writer.path / "file.bin").write_bytes(b"data")
        writer.facts["n"] = 4
        writer.made_by["seconds"] = 17
    two = find_artifact(tmp_path / "b", "k")
    assert two is not None
    assert one.digest == two.digest
    assert make(tmp_path / "c", "k", b"DATA").digest != one.digest


def test_a_body_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail_half_way() -> None:
        with writing_artifact(tmp_path, kind="thing", key="k") as writer:
            (writer.path / "file.bin").write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert list(artifacts_dir(tmp_path).iterdir()) == []


def test_a_killed_writer_leaves_a_part_that_is_no_artifact_and_the_next_writer_removes_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from dflash_model.storage import writing_artifact\n"
        "with writing_artifact(Path(sys.argv[1]), kind='thing', key='k') as w:\n"
        "    (w.path / 'file.bin').write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert [p.name.startswith("k.part-") for p in artifacts_dir(tmp_path).iterdir()] == [True]
    assert find_artifact(tmp_path, "k") is None
    make(tmp_path, "k")
    assert [p.name for p in artifacts_dir(tmp_path).iterdir()] == ["k"]


def test_a_sweep_removes_what_dead_writers_left_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, "k")
    code = "from dflash_model.parts import this_writer; print(this_writer())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    mine = part_name("y.json")
    for name in (f"ledger/x.json.part-{dead}", f"artifacts/k2.part-{dead}/f", f"incoming/abc/c.pt.part-{dead}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / "ledger" / mine).write_bytes(b"mine")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / f"z.part-{dead}").write_bytes(b"the user's")
    for name, age_s in (("young", 3600), ("old", 25 * 3600)):
        path = tmp_path / "ledger" / f"{name}.part-4711"
        path.write_bytes(b"of whom?")
        os.utime(path, (time.time() - age_s,) * 2)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.part-*")) == sorted([mine, f"z.part-{dead}", "young.part-4711"])
    assert find_artifact(tmp_path, "k") is not None


def test_a_part_of_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    code = "from dflash_model.parts import this_writer; print(this_writer(), flush=True); input()"
    writer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout is not None
        part = artifacts_dir(tmp_path) / f"k.part-{writer.stdout.readline().strip()}"
        part.mkdir(parents=True)
        make(tmp_path, "k")
        assert part.is_dir()
    finally:
        writer.communicate("")


def test_a_file_that_shrank_or_vanished_makes_the_artifact_missing(tmp_path: Path) -> None:
    make(tmp_path, "k")
    file = artifacts_dir(tmp_path) / "k" / "file.bin"
    file.write_bytes(b"dat")
    assert find_artifact(tmp_path, "k") is None
    file.unlink()
    assert find_artifact(tmp_path, "k") is None


def test_an_artifact_without_manifest_is_replaced(tmp_path: Path) -> None:
    (artifacts_dir(tmp_path) / "k").mkdir(parents=True)
    (artifacts_dir(tmp_path) / "k" / "stray").write_bytes(b"x")
    manifest = make(tmp_path, "k")
    assert [f.name for f in manifest.files] == ["file.bin"]


def test_a_second_writer_of_the_same_key_keeps_the_first_result(tmp_path: Path) -> None:
    first = make(tmp_path, "k", b"first")
    with writing_artifact(tmp_path, kind="thing", key="k") as writer:
        (writer.path / "file.bin").write_bytes(b"second")
    assert find_artifact(tmp_path, "k") == first


def test_an_artifact_that_lost_a_file_is_replaced(tmp_path: Path) -> None:
    first = make(tmp_path, "k")
    (artifacts_dir(tmp_path) / "k" / "file.bin").unlink()
    assert make(tmp_path, "k") == first


def test_a_missing_or_other_part_makes_the_whole_missing(tmp_path: Path) -> None:
    part = make(tmp_path, "p", b"part")
    make(tmp_path, "whole", p=part.digest)
    (artifacts_dir(tmp_path) / "p" / "file.bin").unlink()
    assert find_artifact(tmp_path, "whole") is None
    (artifacts_dir(tmp_path) / "p" / "manifest.json").unlink()
    (artifacts_dir(tmp_path) / "p").rmdir()
    make(tmp_path, "p", b"trap")
    assert find_artifact(tmp_path, "whole") is None


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    make(tmp_path, "k")
    verify_artifact(tmp_path, "k")
    (artifacts_dir(tmp_path) / "k" / "file.bin").write_bytes(b"dada")
    assert find_artifact(tmp_path, "k") is not None
    with pytest.raises(StorageError, match="differs from its manifest"):
        verify_artifact(tmp_path, "k")


def test_a_manifest_that_was_edited_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "k")
    path = artifacts_dir(tmp_path) / "k" / "manifest.json"
    write_json(path, json.loads(path.read_text()) | {"facts": {"n": 99}})
    with pytest.raises(StorageError, match="damaged manifest"):
        read_manifest(path.parent)


def test_write_file_replaces_whole_and_leaves_no_part(tmp_path: Path) -> None:
    write_file(tmp_path / "d" / "f", b"one")
    write_file(tmp_path / "d" / "f", b"two")
    assert [(p.name, p.read_bytes()) for p in (tmp_path / "d").iterdir()] == [("f", b"two")]


def test_a_full_disk_is_a_sentence() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    from dflash_model.errors import from_os_error

    with full.open("wb", buffering=0) as file, pytest.raises(OSError) as caught:
        file.write(b"x")
    assert "No room" in from_os_error(caught.value, "writing /dev/full").problem


def test_reading_json_that_is_missing_or_rubbish_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Not found"):
        read_json(tmp_path / "none")
    (tmp_path / "bad").write_text("{")
    with pytest.raises(EvalError, match="is not JSON"):
        read_json(tmp_path / "bad")
