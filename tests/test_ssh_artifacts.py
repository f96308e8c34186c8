"""find_artifact through scripts agrees with find_artifact on the disk, whole or broken in any way, and asks few times."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from dflash_model.artifacts import Manifest
from dflash_model.errors import HostError
from dflash_model.storage import artifacts_dir, find_artifact, writing_artifact
from tasks.remote import ssh_artifacts
from tasks.remote.shell import Completed


class ShellHere:
    """Runs scripts on this machine and counts them."""

    name = "gpu"

    def __init__(self, path: str = "/usr/bin:/bin") -> None:
        self.count = 0
        self._path = path

    def run_for(self, _doing: str, script: str, *, timeout_s: float, stdin: bytes = b"") -> Completed:
        self.count += 1
        done = subprocess.run(
            ["/bin/sh", "-c", script], input=stdin, capture_output=True, timeout=timeout_s, check=False, env={"PATH": self._path}
        )
        return Completed(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)


def through_scripts(work: Path, key: str, shell: ShellHere | None = None) -> Manifest | None:
    return ssh_artifacts.find_artifact(shell or ShellHere(), PurePosixPath(artifacts_dir(work)), key)  # type: ignore[arg-type]


def make(work: Path, key: str, *, parts: tuple[str, ...] = (), files: int = 2) -> Manifest:
    with writing_artifact(work, kind="k", key=key) as writer:
        for number in range(files):
            (writer.path / "sub dir").mkdir(exist_ok=True)
            (writer.path / "sub dir" / f"it's -{number}\n.bin").write_bytes(b"x" * number)
        writer.parts = {part: digest(work, part) for part in parts}
    made = find_artifact(work, key)
    assert made is not None
    return made


def digest(work: Path, key: str) -> str:
    found = find_artifact(work, key)
    assert found is not None
    return found.digest


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """whole -> middle, leaf-0..2; middle -> leaf-1; all in a directory with an awkward name."""
    work = tmp_path / "a 'work' dir"
    for number in range(3):
        make(work, f"leaf-{number}", files=number)
    make(work, "middle", parts=("leaf-1",))
    make(work, "-whole", parts=("middle", "leaf-0", "leaf-1", "leaf-2"))
    return work


def file_of(work: Path, key: str) -> Path:
    return next(p for p in (artifacts_dir(work) / key).rglob("*.bin") if p.stat().st_size)


def edit_manifest(work: Path, key: str, change: Callable[[dict[str, object]], object]) -> None:
    path = artifacts_dir(work) / key / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def replace_by_link(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)


def keep(path: Path) -> Path:
    """A copy elsewhere."""
    return Path(shutil.copy(path, path.parents[3] / "kept"))


BREAKAGES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda work: None,
    "a part is gone": lambda work: shutil.rmtree(artifacts_dir(work) / "leaf-2"),
    "a part of a part is gone": lambda work: shutil.rmtree(artifacts_dir(work) / "leaf-1"),
    "a file is shorter": lambda work: file_of(work, "leaf-2").write_bytes(b""),
    "a file is longer": lambda work: file_of(work, "-whole").write_bytes(b"longer"),
    "a file is gone": lambda work: file_of(work, "middle").unlink(),
    "a file became a dangling link": lambda work: replace_by_link(file_of(work, "middle"), Path("/none")),
    "a file became a link to its content": lambda work: replace_by_link(file_of(work, "middle"), keep(file_of(work, "middle"))),
    "a manifest is cut": lambda work: (artifacts_dir(work) / "middle" / "manifest.json").write_text('{"kind": '),
    "a manifest is empty": lambda work: (artifacts_dir(work) / "middle" / "manifest.json").write_text(""),
    "a manifest is gone": lambda work: (artifacts_dir(work) / "leaf-1" / "manifest.json").unlink(),
    "a manifest was edited": lambda work: edit_manifest(work, "leaf-1", lambda data: data.update(kind="other")),
    "a manifest is of another version": lambda work: edit_manifest(work, "leaf-1", lambda data: data.update(format_version=99)),
    "a part was made anew with other content": lambda work: (
        shutil.rmtree(artifacts_dir(work) / "leaf-1"),
        make(work, "leaf-1", files=5),
    ),
    "everything is gone": lambda work: shutil.rmtree(artifacts_dir(work)),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_both_agree_whatever_is_broken(work: Path, breakage: str) -> None:
    assert through_scripts(work, "-whole") is not None, "it is there before"
    BREAKAGES[breakage](work)
    answers = {key: through_scripts(work, key) for key in ("-whole", "middle", "leaf-0", "leaf-1", "leaf-2", "none")}
    assert answers == {key: find_artifact(work, key) for key in answers}
    assert (answers["-whole"] is not None) == (breakage in ("nothing", "a file became a link to its content"))


def test_a_hundred_parts_cost_three_round_trips(work: Path) -> None:
    for number in range(100):
        make(work, f"part-{number}", files=2)
    make(work, "large", parts=tuple(f"part-{number}" for number in range(100)))
    shell = ShellHere()
    found = through_scripts(work, "large", shell)
    assert found == find_artifact(work, "large")
    assert found is not None
    assert shell.count == 3
    shell = ShellHere()
    assert through_scripts(work, "absent", shell) is None
    assert shell.count == 1


def test_more_files_than_one_command_line_takes(work: Path) -> None:
    with writing_artifact(work, kind="k", key="many") as writer:
        for number in range(1_300):
            (writer.path / f"{number:05}").write_bytes(b"x" * (number % 3))
    assert through_scripts(work, "many") == find_artifact(work, "many")
    (artifacts_dir(work) / "many" / "00700").unlink()
    assert through_scripts(work, "many") is None


def test_hosts_without_stat_count_bytes(work: Path, tmp_path: Path) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name in ("sh", "cat", "wc"):
        (bin_dir / name).symlink_to(shutil.which(name) or "")
    assert through_scripts(work, "-whole", ShellHere(str(bin_dir))) == find_artifact(work, "-whole")
    file_of(work, "leaf-2").write_bytes(b"")
    assert through_scripts(work, "-whole", ShellHere(str(bin_dir))) is None


def test_a_host_that_fails_to_answer_is_an_error_and_not_an_absence(work: Path) -> None:
    class Broken(ShellHere):
        def run_for(self, _doing: str, script: str, *, timeout_s: float, stdin: bytes = b"") -> Completed:
            done = super().run_for(_doing, script, timeout_s=timeout_s, stdin=stdin)
            return Completed(exit_code=done.exit_code, stdout=done.stdout[:-40], stderr=b"cut")

    with pytest.raises(HostError, match=r"\[gpu\] a script failed while looking for middle: cut"):
        through_scripts(work, "middle", Broken())
