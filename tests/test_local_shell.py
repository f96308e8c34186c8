"""Scripts and small files on this machine, by the Shell protocol."""

import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from dflash_model.errors import HostError, InputError
from tasks.remote.local_shell import LocalShell
from tasks.remote.shell import Shell

SHELL: Shell = LocalShell("here")


def test_a_script_gets_its_input_and_gives_both_outputs_and_its_code() -> None:
    done = SHELL.run("cat; echo oh >&2; exit 3", timeout_s=10, stdin=b"\0abc\n")
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"\0abc\n", b"oh\n")


def test_much_input_and_much_output_do_not_block_each_other() -> None:
    block = b"x" * (1 << 20)
    assert SHELL.run("cat", timeout_s=10, stdin=block).stdout == block
    assert SHELL.run("exit 0", timeout_s=10, stdin=block).exit_code == 0


def test_a_script_past_its_time_is_killed_with_all_it_started(tmp_path: Path, living: Callable[[Path], list[str]]) -> None:
    script = f"cd {tmp_path}; sleep 60 & sleep 60"
    started = time.monotonic()
    with pytest.raises(HostError, match=r"\[here\] a script did not end within 0\.3 s\."):
        SHELL.run(script, timeout_s=0.3)
    assert time.monotonic() - started < 5
    deadline = time.monotonic() + 5
    while living(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert living(tmp_path) == []


def test_a_helper_that_outlives_its_script_does_not_hang_the_call(tmp_path: Path) -> None:
    """It holds the pipes open, in a session of its own, out of reach."""
    with pytest.raises(HostError, match="did not end"):
        SHELL.run(f"cd {tmp_path}; setsid sh -c 'echo $$ > pid; exec sleep 60' & sleep 0.1", timeout_s=0.5)
    SHELL.run(f"kill {(tmp_path / 'pid').read_text()}", timeout_s=5)


def test_a_script_that_the_system_refuses_is_a_host_error() -> None:
    with pytest.raises(HostError, match=r"\[here\] a script could not be started: Argument list too long"):
        SHELL.run("true " + "x" * (1 << 18), timeout_s=5)


def test_small_files_are_written_whole_and_read_in_parts(tmp_path: Path) -> None:
    path = PurePosixPath(tmp_path / "new" / "file")
    SHELL.write_small(path, b"0123456789")
    assert SHELL.read_from(path, 7) == b"789"
    assert SHELL.read_from(path, 2, limit=3) == b"234"
    assert SHELL.read_from(path, 10) == b""
    assert SHELL.read_from(path.parent / "none", 0) == b""
    assert [entry.name for entry in Path(path.parent).iterdir()] == ["file"]
    with pytest.raises(InputError, match=r"\[here\] reading"):
        SHELL.read_from(path.parent, 0)


def test_calls_from_many_threads_do_not_mix() -> None:
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = SHELL.run("cat", timeout_s=10, stdin=str(number).encode()).stdout

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number).encode() for number in range(8)}
