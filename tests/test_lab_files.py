"""Files of real hosts over SSH: every method of the Host protocol, with the answers that LocalHost gives on the same disk."""

import hashlib
import os
import random
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from dflash_model.checkpoint.source import BatchedSource, WatchedSource, refuse_change
from dflash_model.errors import CheckpointError, EvalError, HostError, InputError, StorageError
from dflash_model.storage import artifacts_dir, find_artifact, writing_artifact
from tasks.remote.host import Host, literal_pattern
from tasks.remote.local import LocalHost
from tasks.remote.sftp_sessions import SftpSessions
from tasks.remote.ssh_facts import SshFacts
from tasks.remote.ssh_files import SshFiles
from tasks.remote.transfer import copy_artifact, copy_file
from tests.lab_hosts import LabHosts

pytestmark = pytest.mark.lab

ODD_NAMES = (
    "plain", "with space", " leading and trailing ", "it's", 'say "x"', "a\nb", "-rf", "--", "$HOME `id` \\n %s", "ünïcödé 模型", "*?[a]", "!#~&;|<>(){}",
    "\udcff not utf-8", "tab\there", "x" * 200,
)  # fmt: skip


def quiet(_done: int, _total: int) -> None:
    return


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_go_through_every_method(lab_hosts: LabHosts, name: str) -> None:
    host: Host = lab_hosts.host("eval", work=f"work {name}"[:80])
    path, moved = host.work_dir / name / name, host.work_dir / f"{name}-2"[-200:]
    content = os.urandom(100_000)
    host.write_blocks(path, [content[:10], b"", content[10:]])
    assert lab_hosts.on_disk("eval", path).read_bytes() == content
    facts = host.stat(path)
    assert facts is not None
    outside = lab_hosts.on_disk("eval", path).stat()
    assert (facts.path, facts.size_bytes, facts.is_dir) == (path, 100_000, False)
    assert (facts.mtime_ns, facts.inode) == (outside.st_mtime_ns, outside.st_ino)
    assert host.glob(f"{literal_pattern(PurePosixPath(name))}/*") == [facts]
    assert b"".join(host.read_blocks(path)) == content
    assert host.sha256(path) == hashlib.sha256(content).hexdigest()
    with host.open_source(path) as source:
        assert source.read_at(5, 50_000) == content[5:50_005]
    host.rename(path, moved)
    assert host.stat(path) is None
    assert b"".join(host.read_blocks(moved)) == content
    host.remove(moved)
    host.remove(path.parent)
    host.remove(path.parent)
    assert list(lab_hosts.on_disk("eval", host.work_dir).iterdir()) == []


def test_megabytes_go_both_ways_in_any_blocks(lab_hosts: LabHosts) -> None:
    host = lab_hosts.host("eval", work="a work dir")
    content = random.Random(1).randbytes(20_000_003)
    sizes = [1, 32_704, 32_705, 5_000_000, 7, 0]
    blocks, at = [], 0
    for size in sizes:
        blocks.append(content[at : at + size])
        at += size
    host.write_blocks(host.work_dir / "f", [*blocks, content[at:]])
    assert host.sha256(host.work_dir / "f") == hashlib.sha256(content).hexdigest()
    assert b"".join(host.read_blocks(host.work_dir / "f")) == content
    host.write_blocks(host.work_dir / "f", [b"short"])
    assert b"".join(host.read_blocks(host.work_dir / "f")) == b"short"
    host.write_blocks(host.work_dir / "empty", [])
    assert (b"".join(host.read_blocks(host.work_dir / "empty")), host.sha256(host.work_dir / "empty")) == (
        b"",
        hashlib.sha256().hexdigest(),
    )
    assert host.free_bytes() == pytest.approx(os.statvfs(lab_hosts.lab.disk("eval")).f_bavail * 4096, rel=0.05)


def test_globs_agree_with_a_local_host(lab_hosts: LabHosts) -> None:
    disk = lab_hosts.lab.disk("eval") / "work"
    for name in ("a/x.pt", "a/y.pt", "a/.hidden.pt", "b/x.pt", "b/deep/er/z.pt", "c[1]/x.pt", "top.pt", "d e/x.txt"):
        lab_hosts.put("eval", name, b"1")
    (disk / "link").symlink_to("b")
    (disk / "dangling").symlink_to("nowhere")
    (disk / "loop").symlink_to(".")
    remote, local = lab_hosts.host("eval"), LocalHost("eval", disk, threads=1, slots=1)
    patterns = (
        "*", "*.pt", "*/*.pt", "**/*.pt", "b/**/*.pt", "b/**", "**", "a/?.pt", "a/[xy].pt", "a/[!x].pt", "c[[]1]/*", "c[1]/*",
        "link/*", "dangling", "none/*", "top.pt/*", "a/x.pt", "a/.*", "*/x.*", "d e/*", "loop/top.pt", "./a/*", "a/*/",
    )  # fmt: skip
    seen = 0
    for pattern in patterns:
        there = [str(f.path.relative_to(remote.work_dir)) for f in remote.glob(pattern)]
        here = [str(f.path.relative_to(local.work_dir)) for f in local.glob(pattern)]
        assert there == here, pattern
        seen += len(here)
    assert seen > 50
    absolute = [str(f.path) for f in remote.glob(f"{lab_hosts.lab.work}/a/*.pt")]
    assert absolute == [f"{lab_hosts.lab.work}/a/{name}.pt" for name in (".hidden", "x", "y")]


def test_each_refusal_is_a_sentence(lab_hosts: LabHosts) -> None:
    host: Host = lab_hosts.host("eval")
    d = host.work_dir
    for name in ("dir/file", "full/file"):
        lab_hosts.put("eval", name, b"1")
    cases: list[tuple[Callable[[], object], type[EvalError], str]] = [
        (lambda: list(host.read_blocks(d / "none")), InputError, "no such file or directory while reading"),
        (lambda: list(host.read_blocks(d / "dir")), InputError, "a directory stands where a file was expected"),
        (lambda: host.write_blocks(d / "dir", [b"x"]), InputError, "a directory stands where a file was expected"),
        (lambda: host.write_blocks(d / "dir" / "file" / "x", [b"x"]), StorageError, "something stands there already"),
        (lambda: host.sha256(d / "none"), InputError, "no such file or directory while hashing"),
        (lambda: host.rename(d / "none", d / "to"), InputError, "no such file or directory while renaming"),
        (lambda: host.rename(d / "dir", d / "full"), InputError, "a directory stands where a file was expected"),
        (lambda: host.open_source(d / "none").__enter__(), CheckpointError, "there is no checkpoint at"),
        (lambda: host.open_source(d / "dir").__enter__(), CheckpointError, "is not a regular file"),
        (lambda: host.remove(PurePosixPath("/proc/1/status")), StorageError, "permission is denied"),
        (lambda: host.write_blocks(PurePosixPath("/sys/none"), [b"x"]), StorageError, "permission is denied"),
    ]
    for action, cls, words in cases:
        with pytest.raises(cls, match=words) as caught:
            action()
        assert type(caught.value) is cls
        assert caught.value.problem.startswith("[eval] ")
        assert caught.value.fix
    assert lab_hosts.on_disk("eval", d / "dir" / "file").read_bytes() == b"1", "a refused write must not remove the directory"


def test_rename_replaces_a_file_and_makes_parents(lab_hosts: LabHosts) -> None:
    host = lab_hosts.host("eval")
    host.write_blocks(host.work_dir / "a", [b"new"])
    host.write_blocks(host.work_dir / "deep" / "b", [b"old"])
    host.rename(host.work_dir / "a", host.work_dir / "deep" / "b")
    assert b"".join(host.read_blocks(host.work_dir / "deep" / "b")) == b"new"
    host.rename(host.work_dir / "deep", host.work_dir / "far" / "away" / "deep")
    assert b"".join(host.read_blocks(host.work_dir / "far" / "away" / "deep" / "b")) == b"new"


def test_a_source_reads_ranges_and_notices_every_change(lab_hosts: LabHosts) -> None:
    content = random.Random(2).randbytes(9_000_000)
    path = lab_hosts.put("train", "c.pt", content)
    host = lab_hosts.host("train")
    with host.open_source(path) as source:
        assert isinstance(source, BatchedSource)
        assert isinstance(source, WatchedSource)
        assert (source.name, source.size_bytes) == (f"train:{path}", len(content))
        rng = random.Random(3)
        ranges = [(rng.randrange(len(content) - 700_000), rng.choice((0, 1, 30, 700_000))) for _ in range(300)]
        assert source.read_many(ranges) == [content[offset : offset + size] for offset, size in ranges]
        assert source.read_at(0, len(content)) == content
        assert source.changed() is None
        with pytest.raises(CheckpointError, match="ends early"):
            source.read_at(len(content) - 1, 2)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("replace", "was replaced by another file"),
        ("overwrite", "was written to"),
        ("grow", "changed its size from 1000000 to 1000001"),
        ("remove", "was removed"),
    ],
)
def test_a_source_keeps_its_file_and_tells_of_a_change(lab_hosts: LabHosts, change: str, sentence: str) -> None:
    old, new = b"o" * 1_000_000, b"n" * 1_000_000
    path = lab_hosts.put("eval", "c.pt", old)
    file = lab_hosts.on_disk("eval", path)
    with lab_hosts.host("eval").open_source(path) as source:
        assert source.read_at(0, 10) == old[:10]
        if change == "replace":
            other = lab_hosts.on_disk("eval", lab_hosts.put("eval", "new.pt", new))
            os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
            other.rename(file)
            assert source.read_at(0, 1_000_000) == old, "the old file is read to its end"
        elif change == "overwrite":  # same size, same second
            second = file.stat().st_mtime_ns // 10**9 * 10**9
            with file.open("r+b") as handle:
                handle.write(new)
            os.utime(file, ns=(second, second + (file.stat().st_mtime_ns + 1) % 10**9))
        elif change == "grow":
            with file.open("ab") as handle:
                handle.write(b"x")
        else:
            file.unlink()
        with pytest.raises(CheckpointError, match=sentence):
            refuse_change(source)


def test_a_source_that_is_cut_short_says_so_at_once(lab_hosts: LabHosts) -> None:
    path = lab_hosts.put("eval", "c.pt", b"x" * 8_000_000)
    host = lab_hosts.host("eval")
    with host.open_source(path) as source:
        os.truncate(lab_hosts.on_disk("eval", path), 3_000_000)
        began = time.monotonic()
        with pytest.raises(CheckpointError, match="nothing is left at byte 3000000"):
            source.read_at(0, 8_000_000)
        assert time.monotonic() - began < 2
        assert source.read_at(0, 3_000_000) == b"x" * 3_000_000, "the session is still in step"


def test_a_named_pipe_is_not_waited_for(lab_hosts: LabHosts) -> None:
    lab_hosts.put("eval", "x", b"")
    pipe = PurePosixPath(lab_hosts.lab.work / "pipe")
    os.mkfifo(lab_hosts.on_disk("eval", pipe))
    with pytest.raises(CheckpointError, match="not a regular file"), lab_hosts.host("eval").open_source(pipe):
        pass


def test_artifacts_move_between_hosts_and_are_found_as_a_local_disk_finds_them(lab_hosts: LabHosts) -> None:
    disk = lab_hosts.lab.disk("gpu-a") / "work"
    parts = {}
    for number in range(100):
        key = f"states-v1-{number:03}"
        with writing_artifact(disk, kind="sample_states", key=key) as writer:
            (writer.path / "h 0.bin").write_bytes(bytes([number]) * number)
        made = find_artifact(disk, key)
        assert made is not None
        parts[key] = made.digest
    with writing_artifact(disk, kind="states", key="whole") as writer:
        writer.parts = parts
    gpu, evaluator = lab_hosts.host("gpu-a"), lab_hosts.host("eval")
    manifest = gpu.find_artifact("whole")
    assert manifest == find_artifact(disk, "whole")
    assert manifest is not None
    assert evaluator.find_artifact("whole") is None
    began = time.monotonic()
    gpu.find_artifact("whole")
    assert time.monotonic() - began < 2, "a hundred parts, three round trips"
    few = gpu.find_artifact("states-v1-007")
    assert few is not None
    assert copy_artifact(few, gpu, evaluator, on_bytes=quiet) == 7
    assert evaluator.find_artifact("states-v1-007") == few
    assert find_artifact(lab_hosts.lab.disk("eval") / "work", "states-v1-007") == few
    (artifacts_dir(disk) / "states-v1-050" / "h 0.bin").write_bytes(b"short")
    assert gpu.find_artifact("whole") is None
    assert find_artifact(disk, "whole") is None


def test_a_copy_between_hosts_is_checked_and_leaves_no_part(lab_hosts: LabHosts) -> None:
    content = os.urandom(3_000_000)
    path = lab_hosts.put("train", "c.pt", content)
    train, evaluator = lab_hosts.host("train"), lab_hosts.host("eval")
    to = evaluator.work_dir / "incoming" / "c.pt"
    digest = copy_file(train, path, evaluator, to, size_bytes=len(content), sha256=None, on_bytes=quiet)
    assert digest == hashlib.sha256(content).hexdigest()
    with pytest.raises(CheckpointError, match="changed while it was read"):
        copy_file(train, path, evaluator, to, size_bytes=len(content) - 1, sha256=None, on_bytes=quiet)
    assert b"".join(evaluator.read_blocks(to)) == content


def test_a_failing_source_leaves_nothing_at_the_destination(lab_hosts: LabHosts) -> None:
    host = lab_hosts.host("eval")

    def blocks() -> object:
        yield b"x" * 1_000_000
        raise CheckpointError("the source is gone", "")

    with pytest.raises(CheckpointError, match="the source is gone"):
        host.write_blocks(host.work_dir / "f", blocks())  # type: ignore[arg-type]
    assert host.stat(host.work_dir / "f") is None


def test_reading_may_stop_early(lab_hosts: LabHosts) -> None:
    path = lab_hosts.put("eval", "big", bytes(60_000_000))
    host = lab_hosts.host("eval")
    blocks = host.read_blocks(path)
    assert next(iter(blocks))
    blocks.close()  # type: ignore[attr-defined]
    assert host.stat(path) is not None


NOISE = """echo "Welcome to this host! $(hostname)"
printf 'no newline at the end'
echo "warning: module not found" >&2
head -c 2000000 /dev/zero | tr '\\0' '#'
head -c 2000000 /dev/zero | tr '\\0' '!' >&2
set -x
"""


def test_a_noisy_profile_changes_nothing(lab_hosts: LabHosts) -> None:
    lab_hosts.lab.set_profile("eval", NOISE)
    host, shell = lab_hosts.host("eval"), lab_hosts.shell("eval")
    done = shell.run("echo out; echo err >&2; exit 5", timeout_s=20)
    assert (done.exit_code, done.stdout, done.stderr) == (5, b"out\n", b"err\n")
    content = os.urandom(1_000_000)
    path = host.work_dir / "f"
    host.write_blocks(path, [content])
    assert b"".join(host.read_blocks(path)) == content
    assert host.sha256(path) == hashlib.sha256(content).hexdigest()
    assert [f.path for f in host.glob("*")] == [path]
    with host.open_source(path) as source:
        assert source.read_at(10, 100_000) == content[10:100_010]
    sessions = SftpSessions(lab_hosts.connection("eval"), servers=())
    with pytest.raises(HostError, match="something that is not SFTP"), sessions.session():
        pass


def test_without_a_known_sftp_server_the_subsystem_serves(lab_hosts: LabHosts) -> None:
    path = lab_hosts.put("eval", "f", b"12345")
    sessions = SftpSessions(lab_hosts.connection("eval"), servers=("/no/such/server",))
    with sessions.session() as sftp:
        told = sftp.stat(path)
        assert told is not None
        assert told.size_bytes == 5
    sessions.close()


def test_a_profile_that_exits_is_named(lab_hosts: LabHosts) -> None:
    lab_hosts.lab.set_profile("eval", "echo this machine is closed\nexit 0\n")
    with pytest.raises(HostError, match=r"\[eval\] the login shell ended before our script.*this machine is closed") as caught:
        lab_hosts.host("eval").free_bytes()
    assert "~/.bashrc" in caught.value.fix


def poor_path(lab_hosts: LabHosts, *, without: tuple[str, ...]) -> None:
    """Take programs out of the PATH of a host."""
    names = ["sh", "env", "cat", "mkdir", "mv", "rm", "wc", "tail", "head", "df", "tr", "sync", "grep"]
    directory = lab_hosts.lab.disk("eval") / "root" / "bin"
    directory.mkdir()
    for name in [*names, "stat", "sha256sum", "openssl", "shasum"]:
        if name not in without:
            for place in ("/usr/bin", "/bin"):
                if Path(place, name).exists():
                    (directory / name).unlink(missing_ok=True)
                    (directory / name).symlink_to(f"{place}/{name}")
    lab_hosts.lab.set_profile("eval", "export PATH=/root/bin\n")


def test_hosts_with_few_programs_are_served_with_what_they_have(lab_hosts: LabHosts) -> None:
    poor_path(lab_hosts, without=("stat", "sha256sum", "openssl", "shasum"))
    content = os.urandom(300_000)
    path = lab_hosts.put("eval", "dir/f", content)
    outside = lab_hosts.on_disk("eval", path).stat()
    host = lab_hosts.host("eval")
    assert host.sha256(path) == hashlib.sha256(content).hexdigest()
    facts = host.stat(path)
    assert facts is not None
    assert (facts.size_bytes, facts.mtime_ns, facts.inode) == (300_000, outside.st_mtime_ns // 10**9 * 10**9, 0)
    assert host.stat(host.work_dir / "none") is None
    assert host.stat(path.parent).is_dir  # type: ignore[union-attr]
    assert host.glob("*/*") == [facts]
    with host.open_source(path) as source:
        assert source.read_at(0, 300_000) == content
        assert source.changed() is None  # type: ignore[attr-defined]
    with writing_artifact(lab_hosts.lab.disk("eval") / "work", kind="k", key="key") as writer:
        (writer.path / "out").write_bytes(b"12345")
    assert host.find_artifact("key") is not None


def test_openssl_hashes_where_sha256sum_is_missing(lab_hosts: LabHosts) -> None:
    poor_path(lab_hosts, without=("sha256sum", "shasum"))
    path = lab_hosts.put("eval", "f", b"abc")
    assert lab_hosts.host("eval").sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_five_mebibytes_on_stderr_and_a_script_that_echoes_its_input_do_not_block(lab_hosts: LabHosts) -> None:
    shell = lab_hosts.shell("eval")
    done = shell.run("head -c 5242880 /dev/zero | tr '\\0' e >&2; echo done", timeout_s=30)
    assert (done.exit_code, done.stdout, len(done.stderr), done.stderr.strip(b"e")) == (0, b"done\n", 5 << 20, b"")
    content = os.urandom(20_000_000)
    assert shell.run("cat", timeout_s=60, stdin=content).stdout == content
    assert shell.run("head -c 5", timeout_s=60, stdin=content).stdout == content[:5]


def test_scripts_are_posix_sh_whatever_is_in_them(lab_hosts: LabHosts) -> None:
    shell = lab_hosts.shell("eval")
    words = ["a b", "it's", 'x"y', "$HOME", "`id`", "\\0101", "a\nb", "!!", "%s", "ü", "-n"]
    done = shell.run("for w in " + " ".join(map(shlex.quote, words)) + "; do printf '%s\\0' \"$w\"; done", timeout_s=10)
    assert done.stdout.decode().split("\0")[:-1] == words
    assert shell.run("kill -9 $$", timeout_s=10).exit_code == -1
    with pytest.raises(ValueError, match="send it on stdin"):
        shell.run("#" * 200_000, timeout_s=10)
    assert shell.run("sh -s", timeout_s=10, stdin=b": " + b"x" * 200_000 + b"\necho ok\n").stdout == b"ok\n"


def test_small_files_are_written_whole_and_read_from_any_offset(lab_hosts: LabHosts) -> None:
    shell = lab_hosts.shell("eval")
    path = PurePosixPath(lab_hosts.lab.work / "runs" / "a b" / "request.json")
    assert shell.read_from(path, 0) == b""
    shell.write_small(path, b"0123456789")
    assert [shell.read_from(path, at, limit=4) for at in (0, 8, 10, 99)] == [b"0123", b"89", b"", b""]
    shell.write_small(path, b"new")
    assert shell.read_from(path, 0) == b"new"
    with pytest.raises(InputError, match=r"\[eval\] a directory stands where a file was expected"):
        shell.write_small(path.parent, b"x")
    assert sorted(p.name for p in lab_hosts.on_disk("eval", path.parent).iterdir()) == ["request.json"]


def test_many_threads_use_files_of_one_host_at_once(lab_hosts: LabHosts) -> None:
    files = SshFiles(lab_hosts.connection("eval"))
    facts = SshFacts(files.shell, SftpSessions(lab_hosts.connection("eval")))
    work = PurePosixPath(lab_hosts.lab.work)
    failures: list[str] = []

    def use(number: int) -> None:
        path, content = work / f"{number}" / "f", bytes([number]) * 200_000
        files.write_blocks(path, [content])
        with files.open_source(path) as source:
            if source.read_at(7, 100_000) != content[7:100_007] or b"".join(files.read_blocks(path)) != content:
                failures.append(f"{number} read something else")
        if [f.path for f in files.glob(f"{number}/*", start=work)] != [path] or facts.see(path) is None:
            failures.append(f"{number} found something else")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(list((lab_hosts.lab.disk("eval") / "work").iterdir())) == 12
    files.close()
