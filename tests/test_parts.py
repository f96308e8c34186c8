"""Whose a part is, whether its writer lives, and what is removed on a host because of it."""

import ast
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from dflash_model import parts
from dflash_model.parts import is_dead, look, part_name, remove, this_place, this_writer, writer_of
from tasks.remote.code import CodeArchive, ensure_code
from tasks.remote.host_sweep import KEPT_CODES, sweep_host
from tests.local_shell import LocalShell

DAY_S = 24 * 3600.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A living process."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def start_ticks(pid: int) -> int:
    """Field 22 of /proc/PID/stat, counted by hand: the second field, in brackets, may hold anything."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[22 - 3])


def test_it_imports_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(parts.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_a_part_tells_its_writer() -> None:
    assert part_name("a b.bin") == f"a b.bin.part-{this_place()}-{os.getpid()}-{start_ticks(os.getpid())}"
    assert writer_of(part_name("x")) == this_writer()
    assert [writer_of(name) for name in ("x", "x.part-17", "x.part-zz-1-2", f"{part_name('x')}.more")] == [None] * 4


def test_a_writer_is_dead_when_its_very_process_has_ended(sleeper: subprocess.Popen[bytes]) -> None:
    here, pid = this_place(), sleeper.pid
    alive = f"{here}-{pid}-{start_ticks(pid)}"
    assert is_dead(alive) is False
    assert is_dead(f"{here}-{pid}-{start_ticks(pid) + 1}") is True, "the number was used again"
    assert is_dead(f"0badcafe-{pid}-{start_ticks(pid)}") is None, "another machine, boot or container"
    assert is_dead(None) is None
    sleeper.kill()
    while "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)
    assert is_dead(alive) is True, "a zombie writes nothing"


def put(work_dir: Path, name: str, *, age_s: float = 0.0) -> Path:
    path = work_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    os.utime(path, (time.time() - age_s,) * 2)
    if path.parent != work_dir:
        os.utime(path.parent, (time.time() - age_s,) * 2)
    return path


def sweep(work_dir: Path) -> int:
    return sweep_host(LocalShell(), work_dir=PurePosixPath(work_dir), python=sys.executable)


def left(work_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(work_dir)) for path in work_dir.rglob("*") if path.is_file())


def test_a_host_is_swept_of_what_dead_writers_left_and_of_nothing_else(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    work_dir = tmp_path / "a host's: dir"
    dead, alive = (f"{this_place()}-{sleeper.pid}-{start_ticks(sleeper.pid) + more}" for more in (1, 0))
    stays = (
        f"artifacts/k1.part-{alive}/f",
        "artifacts/k3.part-0badcafe-1-2/f",
        "artifacts/k4/manifest.json",
        "samples/s.json.part-4711",
        f"incoming/abc/part.part-{dead}",
        f"models/mine.part-{dead}",
    )
    goes = (
        f"artifacts/k2.part-{dead}/deep",
        f"samples/t.json.part-{dead}",
        f"ledger/deeper/l.json.part-{dead}",
    )
    for name in (*stays, *goes):
        put(work_dir, name)
    old = ("artifacts/k5.part-0badcafe-1-2/f", "samples/u.json.part-4712")
    for name in old:
        put(work_dir, name, age_s=DAY_S + 60)
    young = put(work_dir, "artifacts/k6.part-0badcafe-1-2/f", age_s=DAY_S + 60)
    put(work_dir, "artifacts/k6.part-0badcafe-1-2/g")
    os.utime(young.parent, (time.time() - DAY_S - 60,) * 2)
    assert sweep(work_dir) == len(goes) + len(old)
    assert left(work_dir) == sorted((*stays, "artifacts/k6.part-0badcafe-1-2/f", "artifacts/k6.part-0badcafe-1-2/g"))
    assert sweep(tmp_path / "not there") == 0


def test_only_what_lies_in_our_directories_is_ever_removed(tmp_path: Path) -> None:
    for name in ("w/models/x", "w/artifacts/x", "outside"):
        put(tmp_path, name)
    work_dir = tmp_path / "w"
    wrong = [tmp_path / "outside", work_dir / "models" / "x", work_dir / "artifacts" / ".." / "models" / "x"]
    assert remove({"work_dir": str(work_dir), "paths": [*map(str, wrong), str(work_dir / "artifacts" / "x")]}) == {"removed": 1}
    assert left(tmp_path) == ["outside", "w/models/x"]


def test_old_programs_go_but_for_the_newest_and_those_that_run(tmp_path: Path) -> None:
    for number in range(KEPT_CODES + 4):
        put(tmp_path, f"code/digest{number}/dflash_model.py", age_s=(number + 1) * DAY_S + 60)
    put(tmp_path, "code/young/dflash_model.py", age_s=60)
    running = subprocess.Popen(
        ["sleep", "600"], env=os.environ | {"PYTHONPATH": str(tmp_path / "code" / f"digest{KEPT_CODES + 1}")}
    )
    try:
        while b"PYTHONPATH" not in Path(f"/proc/{running.pid}/environ").read_bytes():
            time.sleep(0.01)
        assert sweep(tmp_path) == 4
    finally:
        running.kill()
        running.wait()
    kept = {path.name for path in (tmp_path / "code").iterdir()}
    assert kept == {"young", "digest0", "digest1", f"digest{KEPT_CODES + 1}"}


def test_a_program_that_is_used_counts_as_new(tmp_path: Path) -> None:
    archive = CodeArchive(content=b"any")
    directory = put(tmp_path, f"code/{archive.digest}/dflash_model.py", age_s=9 * DAY_S).parent
    ensure_code(LocalShell(), archive, work_dir=PurePosixPath(tmp_path), python=sys.executable)
    assert time.time() - directory.stat().st_mtime < 60


def test_a_host_that_cannot_be_swept_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shell = LocalShell()
    assert sweep_host(shell, work_dir=PurePosixPath(tmp_path), python="/none/python") == 0
    assert "not swept: [h] /none/python cannot sweep" in caplog.text
    shell.cut()
    assert sweep_host(shell, work_dir=PurePosixPath(tmp_path), python=sys.executable) == 0
    assert "not swept: [h] the link is down." in caplog.text


def test_what_it_answers_on_a_host_is_what_it_finds_here(tmp_path: Path) -> None:
    put(tmp_path, f"artifacts/{part_name('k')}")
    order = {"do": "look", "work_dir": str(tmp_path), "kept_codes": 3}
    done = subprocess.run(
        [sys.executable, "-I", "-", json.dumps(order)], input=Path(parts.__file__).read_bytes(), capture_output=True, check=True
    )
    (there,), (here,) = json.loads(done.stdout)["found"], look(order)["found"]
    assert there[:3] == here[:3] == [str(tmp_path / "artifacts" / part_name("k")), this_writer(), False]
