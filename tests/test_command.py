"""Scripts put to a login shell: they arrive unchanged through every shell of this machine, behind a marker, and can be killed."""

import shutil
import subprocess
import time

import pytest

from tasks.remote.command import LONGEST_BYTES, VARIABLE, command_line, kill_script, quote

SHELLS = [name for name in ("sh", "bash", "dash", "zsh", "ksh", "mksh", "tcsh", "csh", "fish") if shutil.which(name)]
MARKER, TOKEN = "0123456789abcdef", "feedface"
STRANGE = 'it\'s "x" $HOME `id` \\n \\0101 %s ! ~ * ? [a] # ; & | < > ( ) { } ünïcödé 模型 \t tab\nand a newline\n'


def run(shell: str, script: str, *, before: str = "") -> subprocess.CompletedProcess[bytes]:
    line = command_line(script, marker=MARKER, token=TOKEN)
    return subprocess.run([shell, "-c", before.encode() + line], capture_output=True, check=False, timeout=10)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_arrives_unchanged_through_any_login_shell(shell: str) -> None:
    done = run(shell, f"printf %s {quote(STRANGE)}; echo err >&2; exit 7")
    head, _, content = done.stdout.partition(b"\n")
    assert head.split()[0] == MARKER.encode()
    assert head.split()[1].isdigit()
    assert content.decode() == STRANGE
    assert done.stderr == MARKER.encode() + b"\nerr\n"
    assert done.returncode == 7


def test_bytes_that_are_no_text_arrive_unchanged() -> None:
    name = b"caf\xe9 \xff".decode("utf-8", "surrogateescape")
    assert run("sh", f"printf %s {quote(name)}").stdout.partition(b"\n")[2] == b"caf\xe9 \xff"


def test_a_shell_that_echoes_its_commands_does_not_print_the_marker_too_early() -> None:
    done = run("bash", "echo out", before="set -x; ")
    assert done.stderr.count(MARKER.encode()) == 1
    assert VARIABLE.encode() in done.stderr.partition(MARKER.encode())[0], "the echo is there, or this test shows nothing"


def test_a_script_that_no_command_line_holds_is_refused() -> None:
    assert len(command_line("a" * (LONGEST_BYTES - 1000), marker=MARKER, token=TOKEN)) < 128 << 10
    with pytest.raises(ValueError, match="send it on stdin"):
        command_line("\n" * (LONGEST_BYTES // 4), marker=MARKER, token=TOKEN)


@pytest.mark.parametrize("shell", [name for name in ("dash", "bash", "sh") if shutil.which(name)])
def test_killing_ends_the_whole_group_even_if_it_ignores_sigterm_and_no_other(shell: str) -> None:
    script = "trap '' TERM; sleep 60 & echo ready; wait"
    with subprocess.Popen(
        ["sh", "-c", command_line(script, marker=MARKER, token=TOKEN)], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[1])
        assert process.stdout.readline() == b"ready\n"
        subprocess.run([shell, "-c", kill_script(pid, token="another one's")], check=False, timeout=10)
        time.sleep(0.1)
        assert process.poll() is None, "another program with that number is left alone"
        subprocess.run([shell, "-c", kill_script(pid, token=TOKEN)], check=False, timeout=10)
        assert process.wait(timeout=5) == -9
        assert process.stdout.read() == b"", "sleep held the pipe and is gone too"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_whose_number_never_came_is_found_by_its_token(shell: str) -> None:
    line = command_line("sleep 100 & echo ready; wait", marker=MARKER, token="0ddba11")
    with subprocess.Popen([shell, "-c", line], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == b"ready\n"
        subprocess.run(["sh", "-c", kill_script(None, token="another")], check=False, timeout=10)
        time.sleep(0.1)
        assert process.poll() is None
        subprocess.run(["sh", "-c", kill_script(None, token="0ddba11")], check=False, timeout=10)
        assert process.wait(timeout=5) < 0
        assert process.stdout.read() == b"", "sleep held the pipe and is gone too"
