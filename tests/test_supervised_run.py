"""What is asked of a host about one run: whether it is still the same process, and that every path is quoted."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from dflash_model.errors import HostError
from dflash_model.stages.process_groups import ProcessIdentity
from tasks.remote.shell import Completed
from tasks.remote.supervised_run import SupervisedRun
from tests.local_shell import LocalShell


class Known(SupervisedRun):
    """A run whose supervisor is whoever the test says."""

    def __init__(self, directory: Path) -> None:
        super().__init__(
            LocalShell(), PurePosixPath(directory), python=sys.executable, code_dir=PurePosixPath("/none"), variables={}
        )

    def under(self, identity: ProcessIdentity) -> "Known":
        completed = Completed(exit_code=0, stdout=json.dumps(identity.to_json()).encode(), stderr=b"")
        assert self.refusal(completed) is None
        return self


@pytest.fixture
def run(tmp_path: Path) -> Known:
    directory = tmp_path / 'r "1" $(touch hurt) it\'s `x`'
    directory.mkdir()
    return Known(directory).under(ProcessIdentity.of_this_process())


@pytest.fixture
def oddly_named() -> Iterator[int]:
    """A process whose name has spaces and brackets, as /proc shows it."""
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') R 1 (x y', 0, 0, 0); print(1, flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert ") R 1 (x y" in Path(f"/proc/{child.pid}/stat").read_text()
    yield child.pid
    child.communicate()


def directory_of(run: Known) -> Path:
    return Path(run._directory)


def ticks_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_look_tells_life_sizes_and_ending(run: Known) -> None:
    directory = directory_of(run)
    look = run.look()
    assert (look.alive, look.ending, look.answers_bytes, look.log_bytes) == (True, None, 0, 0)
    (directory / "answers.jsonl").write_bytes(b"x" * 11)
    (directory / "log").write_bytes(b"y" * 7)
    (directory / "exit.json").write_text('{\n "exit_code": 0,\n "detail": "a\\\\nb"\n}\n')
    look = run.look()
    assert (look.answers_bytes, look.log_bytes) == (11, 7)
    assert look.ending == {"exit_code": 0, "detail": "a\\nb"}
    assert not (directory / "hurt").exists()
    assert not Path("/hurt").exists()


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot_id": "another"}, {"pid": 4_194_304}])
def test_another_process_with_that_number_is_not_it(run: Known, change: dict[str, int | str]) -> None:
    stranger = dataclasses.replace(ProcessIdentity.of_this_process(), **change)  # type: ignore[arg-type]
    assert run.look().alive
    assert not run.under(stranger).look().alive


def test_a_process_with_an_odd_name_is_recognised(run: Known, oddly_named: int) -> None:
    own = ProcessIdentity.of_this_process()
    identity = dataclasses.replace(own, pid=oddly_named, start_ticks=ticks_of(oddly_named))
    assert run.under(identity).look().alive
    assert not run.under(dataclasses.replace(identity, start_ticks=identity.start_ticks + 1)).look().alive


def test_a_zombie_is_gone(run: Known) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = dataclasses.replace(ProcessIdentity.of_this_process(), pid=child.pid, start_ticks=ticks_of(child.pid))
    while ") Z" not in Path(f"/proc/{child.pid}/stat").read_text():
        pass
    assert not run.under(identity).look().alive
    child.wait()


def test_a_directory_that_is_gone_is_empty(run: Known) -> None:
    directory_of(run).rmdir()
    assert run.look().answers_bytes == 0
    assert run.end() == []


def test_an_answer_without_sense_is_a_host_error(run: Known) -> None:
    (directory_of(run) / "exit.json").write_text("half of a")
    with pytest.raises(HostError, match=r"could not look at"):
        run.look()


def test_a_lease_is_renewed_by_content(run: Known) -> None:
    for count in (1, 2):
        run.renew_lease(count)
        assert (directory_of(run) / "lease").read_text() == f"{count}\n"
    assert [path.name for path in directory_of(run).iterdir()] == ["lease"]


def test_a_refusal_is_what_was_said_last(run: Known) -> None:
    completed = Completed(exit_code=127, stdout=b"", stderr=b"env: a\nenv: 'python': No such file or directory\n")
    assert run.refusal(completed) == "env: 'python': No such file or directory"


def test_nothing_to_end_ends_without_an_interpreter(tmp_path: Path) -> None:
    run = Known(tmp_path)
    run._python = "/none/python"
    assert run.end() == []
    assert (tmp_path / "cancel").exists(), "a start that comes late finds it"
    (tmp_path / "pid").touch()
    with pytest.raises(HostError, match="could not end a stage"):
        run.end()


def test_removing_removes_everything(tmp_path: Path) -> None:
    directory = tmp_path / "a b"
    (directory / "c").mkdir(parents=True)
    Known(directory).remove()
    assert list(tmp_path.iterdir()) == []
