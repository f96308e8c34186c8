"""What the lock program makes of lock files and of nvidia-smi; how it holds up between processes is in test_gpu_lock.py."""

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dflash_model.stages.process_groups import ProcessIdentity
from tasks.remote import lock_program
from tasks.remote.lock_program import (
    lack_of_memory,
    look_at_memory,
    memory_of,
    read_lock,
    release,
    renew,
    runs_here,
    seconds_of,
    spelled,
    take,
)

GIB = 1024.0


def order(tmp_path: Path, **fields: Any) -> dict[str, Any]:
    default = {"directory": str(tmp_path), "token": "t1", "holder": "A", "process": None, "ttl_s": 60.0}
    return default | {"gpus": [0], "gpu": 0, "min_free_mib": None} | fields


@pytest.fixture(autouse=True)
def _no_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def nvidia_smi(tmp_path: Path, script: str) -> None:
    path = tmp_path / "bin" / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_it_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(lock_program.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_lock_says_who_when_and_until_when(tmp_path: Path) -> None:
    before = time.time()
    assert take(order(tmp_path)) == {"gpu": 0, "cuda": False, "instead_of": None}
    lock = json.loads((tmp_path / "gpu-0").read_text())
    assert lock["holder"] == "A"
    assert before - 0.001 <= seconds_of(lock["taken_at"]) <= time.time()
    assert seconds_of(lock["expires_at"]) - seconds_of(lock["taken_at"]) == pytest.approx(60, abs=0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".guard", "bin", "gpu-0"]


def test_a_renewal_changes_the_expiry_alone_and_not_the_length(tmp_path: Path) -> None:
    take(order(tmp_path))
    first = (tmp_path / "gpu-0").read_text()
    inode = (tmp_path / "gpu-0").stat().st_ino
    time.sleep(0.01)
    assert renew(order(tmp_path, ttl_s=100.0)) == {"held": True}
    second = (tmp_path / "gpu-0").read_text()
    assert len(second) == len(first)
    assert (tmp_path / "gpu-0").stat().st_ino == inode, "written in place: needs no room"
    a, b = json.loads(first), json.loads(second)
    assert seconds_of(b.pop("expires_at")) - seconds_of(a.pop("expires_at")) == pytest.approx(40, abs=1)
    assert a == b


def test_only_the_holder_renews_and_releases(tmp_path: Path) -> None:
    take(order(tmp_path))
    before = (tmp_path / "gpu-0").read_text()
    assert renew(order(tmp_path, token="t2")) == release(order(tmp_path, token="t2")) == {"held": False}
    assert (tmp_path / "gpu-0").read_text() == before
    assert release(order(tmp_path)) == {"held": True}
    # A renewal that comes late, after the release, must not bring the lock back.
    assert renew(order(tmp_path)) == release(order(tmp_path)) == {"held": False}
    assert not (tmp_path / "gpu-0").exists()


def test_where_nothing_is_there_is_nothing_to_renew(tmp_path: Path) -> None:
    nowhere = order(tmp_path, directory=str(tmp_path / "none"))
    assert renew(nowhere) == release(nowhere) == {"held": False}
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", ["", "reserved", "[1]", '{"holder": "B"}', '{"holder": "B", "expires_at": "soon"}', "\xff"])
def test_a_file_that_is_no_lock_counts_as_taken_when_it_was_written(tmp_path: Path, content: str) -> None:
    path = tmp_path / "gpu-0"
    path.write_bytes(content.encode("latin-1"))
    lock = read_lock(path, ttl_s=60.0)
    assert lock is not None
    assert lock["expires"] == pytest.approx(time.time() + 60, abs=5)
    assert take(order(tmp_path))["gpu"] is None
    os.utime(path, (0, time.time() - 61))
    assert take(order(tmp_path)) == {"gpu": 0, "cuda": False, "instead_of": "an unknown holder"}


@pytest.mark.parametrize("spell", [lambda s: s, spelled, lambda s: spelled(s).replace("+00:00", "Z")])
def test_the_expiry_may_be_a_number_or_a_text(tmp_path: Path, spell: Any) -> None:
    path = tmp_path / "gpu-0"
    path.write_text(json.dumps({"holder": "by hand", "expires_at": spell(time.time() + 5)}))
    assert take(order(tmp_path))["refused"][0]["holder"] == "by hand"
    path.write_text(json.dumps({"holder": "by hand", "expires_at": spell(time.time() - 5)}))
    assert take(order(tmp_path))["instead_of"] == "by hand"


def test_an_expired_lock_whose_holder_runs_here_is_not_free(tmp_path: Path) -> None:
    process = subprocess.Popen(["/bin/sleep", "60"])
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    me = ProcessIdentity.of_this_process().to_json()
    other = me | {"pid": process.pid, "start_ticks": int(stat[19])}
    assert runs_here(me)
    assert not runs_here(me | {"start_ticks": me["start_ticks"] + 1}), "another process with that number"
    assert not runs_here(me | {"boot_id": "another machine"})
    take(order(tmp_path, ttl_s=0.0, process=other))
    (refused,) = take(order(tmp_path, token="t2"))["refused"]
    assert (refused["holder"], refused["expired"]) == ("A", True)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert take(order(tmp_path, token="t2"))["gpu"] == 0, "a zombie does not run"
    process.wait()


def test_memory_is_read_as_nvidia_smi_gives_it(tmp_path: Path) -> None:
    assert look_at_memory() == (None, None)
    nvidia_smi(tmp_path, 'echo "$*" > "$0.asked"; echo "0, 3277, 20480"; echo "1, [N/A], [N/A]"')
    assert look_at_memory() == ({0: (3277.0, 20480.0), 1: None}, None)
    asked = (tmp_path / "bin" / "nvidia-smi.asked").read_text()
    assert asked == "--query-gpu=index,memory.free,memory.total --format=csv,noheader,nounits\n"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (
            "echo 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9",
            "nvidia-smi fails: NVIDIA-SMI has failed because it could not talk to the driver",
        ),
        ("exit 12", "nvidia-smi fails: exit code 12"),
        ("echo 'No devices were found'", "nvidia-smi fails: No devices were found"),
        ("echo '0, 1, 2'; exit 14", "nvidia-smi fails: 0, 1, 2"),
        ("exec /bin/sleep 60", "nvidia-smi does not answer within 0.2 s"),
    ],
)
def test_an_nvidia_smi_that_fails_is_told_and_nothing_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, problem: str
) -> None:
    monkeypatch.setattr(lock_program, "LOOK_TIMEOUT_S", 0.2 if "sleep" in script else 10.0)
    nvidia_smi(tmp_path, script)
    assert take(order(tmp_path)) == {"gpu": None, "refused": [{"problem": problem}]}
    assert not (tmp_path / "gpu-0").exists()


def test_too_little_memory_and_a_gpu_that_is_not_there_speak_against_it() -> None:
    memory = {0: (3.2 * GIB, 20 * GIB), 1: None}
    assert lack_of_memory(memory, 0, 3.3 * GIB) == {"free_mib": 3.2 * GIB, "total_mib": 20 * GIB}
    assert lack_of_memory(memory, 0, 3.2 * GIB) is None
    assert lack_of_memory(memory, 0, None) is None
    assert lack_of_memory(memory, 1, 20 * GIB) is None, "not known is not too little"
    assert lack_of_memory(memory, 7, None) == {"there_are": [0, 1]}
    assert memory_of(" 1", " [Not Supported]") is None
