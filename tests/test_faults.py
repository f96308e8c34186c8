"""Breaking a run on purpose, as a user would see it: Ctrl-C and kill -9 in each stage, a full disk.

Each time: a sentence and an exit code, no process left, nothing half-written taken for whole, and the next run goes on.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "deployments" / "demo"
STAGES = ("identify-target", "extract-weights", "target-tables", "references", "hidden-states", "replay", "compare")
Living = Callable[[Path], list[str]]


def command(base: Path, *more: str) -> list[str]:
    return [
        str(Path(sys.executable).parent / "dflash-eval"),
        "run",
        *("--home", str(base / "home"), "--target", str(DEMO / "target"), "--prompts", str(base / "prompts.jsonl")),
        *("--candidate", str(DEMO / "drafters" / "step-00055"), "--reference", str(DEMO / "drafters" / "step-00220")),
        *("--max-new-tokens", "24", *more),
    ]


def start(base: Path, *more: str) -> subprocess.Popen[str]:
    """A run in a session of its own, its output in base/out and base/err, as a terminal would have it."""
    with (base / "out").open("w") as out, (base / "err").open("w") as err:
        return subprocess.Popen(command(base, *more), stdout=out, stderr=err, text=True, cwd=base, start_new_session=True)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:4]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def stage_pid(base: Path, stage: str, run: subprocess.Popen[str]) -> int:
    """The stage program of this run, as soon as it is there."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert run.poll() is None, (base / "err").read_text()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if "dflash_model.stages" in words and stage in words and any(word.startswith(str(base)) for word in words):
                return int(process.name)
        time.sleep(0.005)
    raise AssertionError(f"{stage} did not start")


def forget(base: Path, stage: str) -> None:
    """Drop what this stage made in an earlier round: stages that run side by side may have finished before the fault."""
    for path in (base / "home").glob(f"*/artifacts/{stage}-*"):
        shutil.rmtree(path)


def nothing_left(base: Path, living: Living) -> None:
    """No process of the run; parts may lie about only until the next run of the same key."""
    until = time.monotonic() + 15
    while living(base) and time.monotonic() < until:
        time.sleep(0.1)
    assert living(base) == []
    for manifest_dir in (base / "home").glob("*/artifacts/*"):
        if ".part-" not in manifest_dir.name:
            assert (manifest_dir / "manifest.json").is_file()


def finish(base: Path) -> bytes:
    """Run to the end; result.json."""
    done = subprocess.run(command(base), cwd=base, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(base.rglob("*.part-*"))
    return (base / "home" / "runs" / "latest" / "result.json").read_bytes()


def test_ctrl_c_in_each_stage_is_a_sentence_and_the_next_run_goes_on(base: Path, living: Living) -> None:
    for stage in STAGES:
        forget(base, stage)
        run = start(base)
        stage_pid(base, stage, run)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(timeout=60) == 130, (base / "err").read_text()
        err = (base / "err").read_text()
        assert "Interrupted" in err
        assert "fix: `dflash-eval rerun" in err
        assert "Traceback" not in err
        nothing_left(base, living)
    finish(base)


def test_kill_9_of_the_flow_in_each_stage_leaves_no_process_and_the_next_run_goes_on(base: Path, living: Living) -> None:
    for stage in STAGES:
        forget(base, stage)
        run = start(base)
        stage_pid(base, stage, run)
        run.send_signal(signal.SIGKILL)
        run.wait(timeout=60)
        nothing_left(base, living)
    finish(base)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB: enough for Prefect and the parts, not for what the test fills in."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(place)], check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a small file system needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("room_kib", [16, 400, 1200])
def test_a_full_disk_is_a_sentence_and_the_next_run_goes_on(base: Path, small_disk: Path, living: Living, room_kib: int) -> None:
    (base / "hosts.yaml").write_text(f"hosts:\n  h: {{work_dir: {small_disk}/h}}\n")
    filler = small_disk / "filler"
    free = os.statvfs(small_disk)
    filler.write_bytes(b"\0" * (free.f_bavail * free.f_frsize - room_kib * 1024))
    run = start(base, "--hosts", str(base / "hosts.yaml"))
    assert run.wait(timeout=180) == 3
    err = (base / "err").read_text()
    assert "No room while" in err or "are free at" in err
    assert "fix: " in err
    assert "Traceback" not in err
    assert living(base) == []
    for artifact in (small_disk / "h" / "artifacts").glob("*"):
        assert ".part-" not in artifact.name
        assert json.loads((artifact / "manifest.json").read_text())["key"] == artifact.name
    filler.unlink()
    done = subprocess.run(
        command(base, "--hosts", str(base / "hosts.yaml")), cwd=base, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
