"""Locks on GPUs between real processes: one holder at a time, whatever happens to it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from dflash_model.errors import Cancelled, HostBusy, HostError, HostTaken, StageError
from tasks.remote import gpu_lock
from tasks.remote.gpu_lock import HeldGpu, lock_lifetime_s
from tasks.remote.lock_program import FORGOTTEN_S, seconds_of
from tests.gpu_bench import OTHER, GpuBench, busy, span
from tests.local_shell import LocalShell as FaultyShell

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuBench:
    return GpuBench(tmp_path, monkeypatch)


def start_holder(bench: GpuBench, *, lifetime_s: float) -> subprocess.Popen[bytes]:
    """A process of its own that holds GPU 0 until its input closes."""
    code = (
        "import sys\nfrom pathlib import PurePosixPath\nfrom tasks.remote.gpu_lock import GpuLocks\n"
        "from tasks.remote.local_shell import LocalShell\n"
        "locks = GpuLocks(LocalShell('h'), work_dir=PurePosixPath(sys.argv[1]), python=sys.executable, gpus=(0,),\n"
        "                 min_free_gib=None, lifetime_s=float(sys.argv[2]))\n"
        "with locks.holding('a relay elsewhere'):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(bench.work_dir), str(lifetime_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def in_threads(count: int, action: Callable[[int], None]) -> None:
    """All at the same time; what one raises is raised."""
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        barrier.wait()
        action(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(run, range(count)))


def test_a_held_gpu_is_refused_with_its_holder_and_free_again_at_once(bench: GpuBench) -> None:
    with bench.locks().holding("box-a pid 4711 run 20260101-030000") as gpu:
        assert gpu == HeldGpu(number=0, cuda=False)
        holds = f"gpu 0 is held by box-a pid 4711 run 20260101-030000 {span(bench.lock_file())}"
        assert busy(bench.locks()) == f"[h] no GPU is free: {holds}."
        with bench.locks((0, 1)).holding("b") as other:
            assert other.number == 1
    assert [path.name for path in bench.lock_file().parent.glob("*")] == [".guard"]
    with bench.locks().holding("c"):
        assert json.loads(bench.lock_file().read_text())["holder"] == "c"


@pytest.mark.parametrize("gpus", [(0,), (3, 1)])
def test_of_eight_contenders_each_gpu_has_one_holder_at_a_time(bench: GpuBench, gpus: tuple[int, ...]) -> None:
    guard, inside, most, done = threading.Lock(), [0] * 4, [0] * 4, []

    def contend(number: int) -> None:
        end = time.monotonic() + 50
        while True:
            try:
                with bench.locks(gpus).holding(f"contender {number}") as gpu:
                    with guard:
                        inside[gpu.number] += 1
                        most[gpu.number] = max(most[gpu.number], inside[gpu.number])
                    time.sleep(0.05)
                    with guard:
                        inside[gpu.number] -= 1
                    done.append(number)
                return
            except HostBusy:
                assert time.monotonic() < end
                time.sleep(0.02)

    in_threads(8, contend)
    assert sorted(done) == list(range(8))
    assert [number for number in range(4) if most[number] == 1] == sorted(gpus)
    assert max(most) == 1


@contextmanager
def program(change: Callable[[str], str]) -> Iterator[None]:
    """Send a changed lock program."""
    text = gpu_lock._program().decode()
    assert change(text) != text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_lock, "_program", lambda: change(text).encode())
        yield


def dawdling(text: str) -> str:
    """Time passes between the look and the change."""
    return text.replace(
        "            write_lock(path, order)\n", "            time.sleep(1)\n            write_lock(path, order)\n"
    )


def unguarded(text: str) -> str:
    return dawdling(text).replace("fcntl.flock(file, fcntl.LOCK_EX)", "pass")


@pytest.mark.parametrize(("change", "holds"), [(dawdling, True), (unguarded, False)])
@pytest.mark.parametrize("expired", [True, False])
def test_of_five_who_see_a_free_gpu_at_once_one_gets_it(
    bench: GpuBench, change: Callable[[str], str], holds: bool, expired: bool
) -> None:
    """Free because it was never taken, or because a lock has expired. Without the guard several win, or meet and fall."""
    if expired:
        bench.leave(expires_in_s=-1)
    ends: list[str] = []
    over = threading.Barrier(5)

    def contend(number: int) -> None:
        try:
            with bench.locks().holding(f"contender {number}"):
                ends.append("won")
                over.wait(timeout=30)
        except HostError as exc:
            ends.append("busy" if isinstance(exc, HostBusy) else "fell")
            over.wait(timeout=30)

    with program(change):
        in_threads(5, contend)
    assert (sorted(ends) == ["busy"] * 4 + ["won"]) is holds


def test_a_lock_of_somebody_elsewhere_holds_until_it_expires(bench: GpuBench) -> None:
    expires = bench.leave(expires_in_s=1.2)
    assert f"gpu 0 is held by {OTHER} since" in busy(bench.locks())
    while bench.lock_file().exists():
        with suppress(HostBusy), bench.locks().holding("next"):
            assert expires <= time.time() < expires + 5
            assert json.loads(bench.lock_file().read_text())["holder"] == "next"


def test_a_holder_that_lives_keeps_its_lock_far_past_its_lifetime(bench: GpuBench) -> None:
    with bench.locks(lifetime_s=1.5).holding("a"):
        first = seconds_of(json.loads(bench.lock_file().read_text())["expires_at"])
        end = time.monotonic() + 3
        while time.monotonic() < end:
            assert "is held by a since" in busy(bench.locks())
        last = seconds_of(json.loads(bench.lock_file().read_text())["expires_at"])
        assert last - first > 1.5, "renewed, not merely spared"


def test_a_killed_holder_s_lock_expires_and_not_before(bench: GpuBench) -> None:
    process = start_holder(bench, lifetime_s=1.5)
    process.kill()
    process.communicate()
    expires = seconds_of(json.loads(bench.lock_file().read_text())["expires_at"])
    assert "gpu 0 is held by a relay elsewhere since" in busy(bench.locks())
    time.sleep(max(0.0, expires - time.time()) + 0.05)
    with bench.locks().holding("next"):
        pass


def test_a_holder_that_is_stopped_on_this_machine_is_not_robbed(bench: GpuBench) -> None:
    """Ctrl-Z stops the relay and its renewals, but not the stage that uses the GPU."""
    process = start_holder(bench, lifetime_s=0.5)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.0)
    assert ", which still runs though it does not renew its lock" in busy(bench.locks())
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(b"")
    assert process.returncode == 0
    assert not bench.lock_file().exists()


@pytest.mark.parametrize("error", [StageError("[h] no."), HostError("[h] no."), KeyboardInterrupt()])
def test_a_body_that_fails_gives_its_gpu_back(bench: GpuBench, error: BaseException) -> None:
    def fail() -> None:
        with bench.locks().holding("a"):
            assert bench.lock_file().exists()
            raise error

    with pytest.raises(type(error)):
        fail()
    assert not bench.lock_file().exists()


@pytest.mark.parametrize(
    "words", ["Process group 7 does not end, even by signal 9.", "It could not be confirmed that it is gone;"]
)
def test_a_body_that_may_run_on_keeps_its_gpu(bench: GpuBench, words: str) -> None:
    def fail(error: BaseException) -> None:
        with bench.locks().holding("a"):
            raise error

    with pytest.raises(Cancelled):
        fail(Cancelled(f"[h] stage replay was ended on request. {words}"))
    assert bench.lock_file().exists()
    bench.lock_file().unlink()
    interrupt = KeyboardInterrupt()
    interrupt.add_note(words)
    with pytest.raises(KeyboardInterrupt):
        fail(interrupt)
    assert bench.lock_file().exists()


def test_whoever_lost_its_lock_leaves_the_next_holder_s_alone(bench: GpuBench, caplog: pytest.LogCaptureFixture) -> None:
    lost = "[h] the lock of gpu 0 was taken from us or removed"
    with bench.locks(lifetime_s=0.8).holding("a"):
        bench.lock_file().unlink()
        with bench.locks().holding("b"):
            before = bench.lock_file().read_text()
            end = time.monotonic() + 10
            while lost not in caplog.text and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.3)
            assert bench.lock_file().read_text() == before
            assert caplog.text.count(lost) == 1, "said once, and no more renewals"
    assert not bench.lock_file().exists()


def test_a_short_cut_of_the_link_costs_no_lock(bench: GpuBench, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = FaultyShell()
    with bench.locks(lifetime_s=3.0, shell=shell).holding("a"):
        shell.cut(1.8)
        time.sleep(3.3)
        assert shell.failures > 1
        assert "is held by a since" in busy(bench.locks())
        # The link is down when the stage ends: the release is tried again.
        shell.cut(0.7)
    assert not bench.lock_file().exists()


def test_a_link_cut_for_good_leaves_the_lock_to_its_expiry(bench: GpuBench, caplog: pytest.LogCaptureFixture) -> None:
    shell, left = FaultyShell(), 0.0

    def fail() -> None:
        nonlocal left
        with bench.locks(lifetime_s=1.0, shell=shell).holding("a"):
            shell.cut()
            left = time.monotonic()
            raise HostError("[h] gone.")

    with pytest.raises(HostError, match="gone"):
        fail()
    assert time.monotonic() - left < 1, "a host that is down is asked once"
    assert "the lock of gpu 0 ends by itself within 1 s: [h] the link is down." in caplog.text
    assert bench.lock_file().exists()


def test_an_interpreter_or_directory_that_does_not_work_is_a_host_error(bench: GpuBench) -> None:
    for given, reason in (({"python": "/none/python"}, "/none/python cannot tend the locks"), ({}, "Not a directory")):
        with pytest.raises(HostError, match=reason) as caught, bench.locks(**given).holding("a"):
            pass
        assert type(caught.value) is HostError
        bench.work_dir.touch()


def test_a_lock_of_a_dead_relay_without_a_stage_is_free_within_a_minute() -> None:
    assert [lock_lifetime_s(lease_s) for lease_s in (8.0, 300.0, 3600.0)] == [8.0, 60.0, 60.0]


def test_those_who_wait_get_the_gpu_in_the_order_in_which_they_came(bench: GpuBench) -> None:
    def asks(name: str, ticket: str | None) -> str:
        with pytest.raises(HostTaken) as caught, bench.locks().holding(name, ticket=ticket):
            pass
        return caught.value.problem

    with bench.locks().holding("a"):
        assert "held by a since" in asks("b", "ticket-b")
        assert "held by a since" in asks("c", "ticket-c")
    # It is free now, and b's: neither whoever came later nor whoever does not wait gets it.
    for name, ticket in (("c", "ticket-c"), ("d", None), ("e", "ticket-e")):
        assert "[h] no GPU is free: gpu 0 is next for b, which waits for it since 2" in asks(name, ticket)
    with bench.locks((0, 1)).holding("f") as other:
        assert other.number == 1, "nobody waits for that one"
    with bench.locks().holding("b", ticket="ticket-b"):
        pass
    assert "is next for c" in asks("e", "ticket-e")
    bench.locks().leave("ticket-c")
    with bench.locks().holding("e", ticket="ticket-e"):
        pass
    assert [path.name for path in bench.lock_file().parent.glob("*")] == [".guard"], "nobody waits: no queue"


def test_whoever_waits_no_more_without_a_word_is_forgotten(bench: GpuBench) -> None:
    with bench.locks().holding("a"), pytest.raises(HostTaken), bench.locks().holding("b", ticket="ticket-b"):
        pass
    with pytest.raises(HostTaken), bench.locks().holding("c"):
        pass
    queue = bench.lock_file().parent / "queue"
    (waiting,) = json.loads(queue.read_text())
    queue.write_text(json.dumps([waiting | {"seen": waiting["seen"] - FORGOTTEN_S - 1}]))
    with bench.locks().holding("c"):
        pass
    queue.write_text("{rubbish")
    with bench.locks().holding("c"):
        pass


def test_only_what_passes_is_worth_waiting_for(bench: GpuBench) -> None:
    bench.nvidia_smi("0, 100, 20480")
    with pytest.raises(HostTaken, match=r"0\.1 of 20 GiB free"), bench.locks(min_free_gib=16).holding("a"):
        pass
    for gpus, wanted, reason in (((1,), 16, "is not there"), ((0,), 40, "wanted are 40")):
        with pytest.raises(HostBusy, match=reason) as caught, bench.locks(gpus, min_free_gib=wanted).holding("a"):
            pass
        assert type(caught.value) is HostBusy
    bench.leave(expires_in_s=60)
    with pytest.raises(HostTaken), bench.locks((1, 0)).holding("a"):
        pass


def test_many_gpus_can_be_held_by_one_process(bench: GpuBench) -> None:
    with ExitStack() as stack:
        numbers = [stack.enter_context(bench.locks((0, 1, 2)).holding("a")).number for _ in range(3)]
        assert numbers == [0, 1, 2]
    assert not list(bench.lock_file().parent.glob("gpu-*"))
