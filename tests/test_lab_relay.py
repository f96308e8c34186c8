"""The selective relay across real hosts: every form byte-equal to torch, and each way in which hosts, disks and files fail."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import paramiko.packet
import pytest
import torch
import torch.distributed.checkpoint as dcp
from namespaces import soon
from safetensors.torch import load_file, save_file

from dflash_model.checkpoint.extracted import EXTRACTED_NAME, WEIGHTS_NAME, Extracted
from dflash_model.errors import CheckpointError, EvalError, SourceChanged, StorageError
from tasks.remote.drafters import RemoteDrafter, discover
from tasks.remote.incoming import incoming_path
from tasks.remote.selection import Selection
from tasks.remote.selective import relay
from tasks.remote.ssh_host import SshHost
from tasks.remote.throttle import Throttle
from tests.checkpoint_files import LEGACY, UNTYPED, drafter_tensors, many_tensors, ordered
from tests.lab_hosts import LabHosts, NoRunner

pytestmark = pytest.mark.lab
ROOT = Path(__file__).resolve().parent.parent
OLD_NS = 10**18
ODD = '-rf it\'s "a" $HOME\n\\x ünï 模型.pt'


def state(tensors: dict[str, torch.Tensor], *, pad: int = 0) -> dict[str, Any]:
    """A training state: wrapped names, frozen tables, moments and `pad` bytes of other ballast."""
    moments = {i: {"exp_avg": torch.ones(t.shape), "exp_avg_sq": torch.zeros(t.shape)} for i, t in enumerate(tensors.values())}
    tables = {"embed_tokens.weight": torch.ones(100, 8), "lm_head.weight": torch.ones(100, 8)}
    return {
        "model_state_dict": ordered(tensors | tables, "module._orig_mod."),
        "optimizer_state_dict": {"state": moments}, "pad": torch.zeros(pad, dtype=torch.uint8), "step": 7,
        "args": argparse.Namespace(mask_token_id=3),
    }  # fmt: skip


class Bench:
    """Train and eval of the lab, and what goes between them."""

    def __init__(self, lab_hosts: LabHosts, directory: Path) -> None:
        self.lab_hosts = lab_hosts
        self.lab = lab_hosts.lab
        self.journals = directory / "transfers"
        self.train = self.host("train")
        self.evaluator = self.host("eval")

    def host(self, name: str, **options: Any) -> SshHost:
        opened = SshHost(
            self.lab_hosts.connection(name), PurePosixPath(self.lab.work), runner=NoRunner(), **({"grace_s": 20.0} | options)
        )
        self.lab_hosts._open.append(opened)
        return opened

    def disk(self, name: str) -> Path:
        return self.lab.disk(name) / "work"

    def put(self, value: Any, name: str = "step.pt", **options: Any) -> RemoteDrafter:
        path = self.disk("train") / name
        torch.save(value, path, **options)
        os.utime(path, ns=(OLD_NS, OLD_NS))
        return self.find(name)

    def find(self, name: str) -> RemoteDrafter:
        self.lab_hosts._train_before = self.lab.files("train")  # what the test has put there
        pattern = "".join(f"[{c}]" if c in "*?[" else c for c in name)
        return discover(self.train, pattern, settle_s=0.1)

    def move(self, drafter: RemoteDrafter, selection: Selection | None = None, *, on_bytes: Any = lambda *_: None) -> Extracted:
        moved = relay(drafter, selection or Selection(), self.train, self.evaluator, journals=self.journals, on_bytes=on_bytes)
        assert moved is not None
        return moved

    def arrived(self, drafter: RemoteDrafter, selection: Selection | None = None) -> Path:
        there = incoming_path(drafter, selection or Selection(), self.evaluator)
        return self.lab_hosts.on_disk("eval", there) / WEIGHTS_NAME

    def left_on_eval(self) -> list[str]:
        return sorted(path.name for path in self.disk("eval").rglob("*") if path.is_file())


@pytest.fixture
def bench(lab_hosts: LabHosts, tmp_path: Path) -> Bench:
    return Bench(lab_hosts, tmp_path)


def big(megabytes: int) -> dict[str, torch.Tensor]:
    """A drafter's tensors of so many MB in all, of 1 MB each."""
    generator = torch.Generator().manual_seed(megabytes)
    found = {f"layers.{i}.mlp.up_proj.weight": torch.randn(512, 512, generator=generator) for i in range(megabytes)}
    return found | {"fc.weight": torch.randn(8, 8, generator=generator)}


def assert_equal(path: Path, tensors: dict[str, torch.Tensor], *, cast: str = "keep") -> None:
    loaded = load_file(path)
    assert set(loaded) == set(tensors)
    rounded = (torch.float32, torch.float16, torch.float64) if cast == "bf16" else ()
    for name, tensor in tensors.items():
        expected = tensor.bfloat16() if tensor.dtype in rounded else tensor
        assert loaded[name].dtype == expected.dtype, name
        # As bytes: equal() cannot compare every dtype, and takes -0 for 0.
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (loaded[name], expected) if t.numel()]
        assert not as_bytes or torch.equal(*as_bytes), name


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_form_dtype_and_layout_is_byte_equal_to_torchs(bench: Bench) -> None:
    tensors = many_tensors() | drafter_tensors()
    typed = many_tensors(without=UNTYPED) | drafter_tensors()
    drafter = bench.put(state(tensors), ODD)
    loaded = torch.load(bench.disk("train") / ODD, weights_only=False)["model_state_dict"]
    own = {name.removeprefix("module._orig_mod."): t for name, t in loaded.items()}
    kept = {name: tensor for name, tensor in own.items() if name in tensors}
    for cast in ("keep", "bf16"):
        selection = Selection(cast=cast)
        moved = bench.move(drafter, selection)
        assert moved.transfer["checked"] == "crc32"
        assert moved.transfer["bytes_read"] + moved.transfer["bytes_saved"] == drafter.size_bytes
        assert_equal(bench.arrived(drafter, selection), kept, cast=cast)
    legacy = bench.put(state(typed), "legacy.pt", **LEGACY)
    assert bench.move(legacy).transfer["checked"] == "sha256"
    assert_equal(bench.arrived(legacy), typed)

    single, sharded = (bench.disk("train") / name for name in ("single it's", "sharded"))
    plain = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    halves = [dict(sorted(plain.items())[::2]), dict(sorted(plain.items())[1::2])]
    for path, files in (
        (single, {"model.safetensors": plain}),
        (sharded, {"a.safetensors": halves[0], "b.safetensors": halves[1]}),
    ):
        path.mkdir()
        for file, some in files.items():
            save_file(some, path / file)
        index = {name: file for file, some in files.items() for name in some}
        if path == sharded:
            (path / "model.safetensors.index.json").write_text(f'{{"weight_map": {str(index).replace(chr(39), chr(34))}}}')
        (path / "config.json").write_text("{}")
        found = bench.find(path.name)
        assert bench.move(found).transfer["checked"] == "sha256"
        assert_equal(bench.arrived(found), plain)
        assert (bench.arrived(found).parent / "config.json").read_text() == "{}"
    dcp.save({"model": ordered(plain, "model."), "step": 4}, checkpoint_id=bench.disk("train") / "dcp", no_dist=True)
    found = bench.find("dcp")
    assert found.step == 4
    bench.move(found)
    assert_equal(bench.arrived(found), plain)


class Once:
    """As on_bytes: does something when a third has gone, once."""

    def __init__(self, do: Callable[[], None]) -> None:
        self.do = do
        self.done = False
        self.offsets: list[int] = []

    def __call__(self, done: int, total: int) -> None:
        self.offsets.append(done)
        if done > total // 3 and not self.done:
            self.done = True
            self.do()


def kill_sessions(bench: Bench, name: str) -> None:
    for pid in bench.lab_hosts.sessions(name):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("victim", ["train", "eval"])
def test_a_killed_sshd_costs_a_break_and_the_file_is_the_same(bench: Bench, victim: str, connections: int) -> None:
    tensors = big(16)
    drafter = bench.put(state(tensors))
    whole = bench.move(drafter)
    bench.evaluator.remove(incoming_path(drafter, Selection(), bench.evaluator))
    bench.train.connections = connections
    killer = Once(lambda: kill_sessions(bench, victim))
    again = bench.move(drafter, on_bytes=killer)
    assert killer.done
    assert again.transfer["connections"] == connections
    assert again.report.sha256 == whole.report.sha256 == hashlib.sha256(bench.arrived(drafter).read_bytes()).hexdigest()
    assert_equal(bench.arrived(drafter), tensors)
    # What had been read was not read again: the index and a few blocks at most.
    assert again.transfer["bytes_read"] < whole.transfer["bytes_read"] * 1.02 + connections * (5 << 20)
    assert bench.left_on_eval() == [EXTRACTED_NAME, WEIGHTS_NAME]


def test_a_relay_killed_by_signal_9_is_resumed_by_the_next(bench: Bench, tmp_path: Path) -> None:
    tensors = big(64)
    drafter = bench.put(state(tensors))
    code = (
        "import json, sys, pathlib; sys.path[:0] = ['.', 'deployments/lab'];"
        "from tasks.remote.drafters import RemoteDrafter; from tasks.remote.inventory import read_inventory;"
        "from tasks.remote.opening import open_host; from tasks.remote.selection import Selection;"
        "from tasks.remote.selective import relay;"
        "inventory = read_inventory(pathlib.Path(sys.argv[1]), home=pathlib.Path(sys.argv[2]));"
        "hosts = {n: open_host(inventory.entry(n)).host for n in ('train', 'eval')};"
        "drafter = RemoteDrafter.from_json(json.loads(sys.argv[3]));"
        "relay(drafter, Selection(), hosts['train'], hosts['eval'], journals=pathlib.Path(sys.argv[4]),"
        " on_bytes=lambda done, total: print(done, flush=True))"
    )
    slow = tmp_path / "hosts.yaml"
    text = bench.lab.hosts_file.read_text().replace("via: ssh,", "via: ssh, max_mb_per_s: 40,")
    slow.write_text(
        text.replace("keys/id_ed25519", str(bench.lab.key)).replace(
            "known_hosts: known_hosts", f"known_hosts: {bench.lab.known_hosts}"
        )
    )
    command = [sys.executable, "-c", code, str(slow), str(tmp_path), json.dumps(drafter.to_json()), str(bench.journals)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) > 44 << 20:
            break
    process.kill()
    process.communicate()
    assert soon(lambda: bench.lab.processes("eval") == {}), bench.lab.processes("eval")
    (part,) = [name for name in bench.left_on_eval() if name.endswith(".part")]
    moved = bench.move(drafter)
    assert moved.transfer["bytes_resumed"] >= 16 << 20
    assert moved.transfer["bytes_read"] < drafter.size_bytes // 3 + (1 << 20) - moved.transfer["bytes_resumed"] + (1 << 20)
    assert_equal(bench.arrived(drafter), tensors)
    assert part not in bench.left_on_eval()


def test_a_full_disk_is_a_sentence_and_leaves_room(bench: Bench) -> None:
    tensors = big(12)
    drafter = bench.put(state(tensors))
    bench.lab_hosts.close()
    bench.lab.restart("eval", work_mib=80)
    try:
        ballast = bench.lab.view("eval") / bench.lab.work.relative_to("/") / "ballast"
        ballast.write_bytes(bytes(10 << 20))
        with pytest.raises(EvalError, match=r"\[eval\] \d+ MiB are free at .*, \d+ MiB are needed"):
            bench.move(drafter)
        ballast.unlink()
        with pytest.raises(StorageError, match=r"\[eval\] no space is left on the disk while writing .*\.part"):
            bench.move(drafter, on_bytes=Once(lambda: ballast.write_bytes(bytes(70 << 20)) and None))
        ballast.unlink()
        assert bench.evaluator.free_bytes() > 79 << 20, "the part is gone"
        bench.move(drafter)
    finally:
        bench.lab_hosts.close()
        bench.lab.restart("eval")


def test_a_byte_flipped_in_the_part_is_caught(bench: Bench) -> None:
    drafter = bench.put(state(big(6)))

    def flip() -> None:
        # What has been handed over is not all on the disk yet.
        assert soon(lambda: sum(part.stat().st_size for part in bench.disk("eval").rglob("*.part")) > 200_000)
        (part,) = bench.disk("eval").rglob("*.part")
        with part.open("r+b") as file:
            file.seek(100_000)
            byte = file.read(1)
            file.seek(100_000)
            file.write(bytes([byte[0] ^ 1]))

    with pytest.raises(StorageError, match=r"from train arrived on eval damaged: bytes 0 to \d+ have sha256"):
        bench.move(drafter, on_bytes=Once(flip))
    assert bench.left_on_eval() == []
    bench.move(drafter)


def other_state(path: Path) -> bytes:
    """Of the same size, with other weights."""
    other = path.with_name("other.pt")
    torch.save(state({name: tensor + 1 for name, tensor in big(6).items()}), other)
    content = other.read_bytes()
    other.unlink()
    # The archive's own name stands in every header; it must be the same for a file of the same name.
    return content.replace(b"other/", b"step.p"[:6])


@pytest.mark.parametrize("how", ["in place", "replaced", "vanishes", "grows"])
def test_a_source_that_does_not_hold_still_is_caught_and_nothing_stays(bench: Bench, how: str) -> None:
    drafter = bench.put(state(big(6)))
    path = bench.disk("train") / "step.pt"

    def change() -> None:
        bench.lab_hosts._train_before = None  # the test itself changes what train holds
        if how == "in place":  # a few bytes, same inode and size, within the second
            with path.open("r+b") as file:
                file.seek(path.stat().st_size // 6)
                file.write(b"overwritten")
            assert path.stat().st_size == drafter.size_bytes
        elif how == "replaced":
            path.with_name("new").write_bytes(other_state(path))
            path.with_name("new").rename(path)
        elif how == "vanishes":
            path.unlink()
        else:
            with path.open("ab") as file:
                file.write(b"more")

    # Overwritten in place, its directory still says what was discovered: the CRC32 tells.
    gone = SourceChanged, r"\[?train\]?.*It is not the checkpoint any more that was found there"
    expected, words = (CheckpointError, r"train:.*is damaged: the CRC32 .* does not match") if how == "in place" else gone
    with pytest.raises(expected, match=words):
        bench.move(drafter, on_bytes=Once(change))
    assert bench.left_on_eval() == []


def test_a_file_that_still_grows_is_refused_until_it_is_whole(bench: Bench) -> None:
    drafter = bench.put(state(big(2)))
    path = bench.disk("train") / "step.pt"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"no complete checkpoint: .*has no zip end record"):
        bench.find("step.pt")
    path.write_bytes(content)
    assert bench.find("step.pt").digest == drafter.digest
    bench.lab_hosts._train_before = None


def test_keys_are_exchanged_anew_under_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paramiko.packet.Packetizer, "REKEY_BYTES", 8 << 20)
    renewed: list[int] = []
    plain = paramiko.Transport._send_kex_init

    def counted(transport: paramiko.Transport) -> None:
        renewed.append(1)
        plain(transport)

    monkeypatch.setattr(paramiko.Transport, "_send_kex_init", counted)
    tensors = big(24)
    drafter = bench.put(state(tensors))
    bench.move(drafter)
    assert len(renewed) > 5
    assert_equal(bench.arrived(drafter), tensors)


def test_a_limit_holds_on_either_side(bench: Bench) -> None:
    drafter = bench.put(state(big(12)))
    for name in ("train", "evaluator"):
        limited = bench.host("train" if name == "train" else "eval", throttle=Throttle(8e6))
        setattr(bench, name, limited)
        began = time.monotonic()
        moved = bench.move(drafter)
        assert time.monotonic() - began > moved.report.bytes_written / 8e6 - 0.5
        bench.evaluator.remove(incoming_path(drafter, Selection(), bench.evaluator))
        setattr(bench, name, bench.host("train" if name == "train" else "eval"))


def test_a_source_that_stalls_is_given_up_and_read_anew(bench: Bench) -> None:
    """The SFTP server is stopped: the link lives and no byte moves."""
    drafter = bench.put(state(big(12)))
    stopped: list[int] = []

    def stop() -> None:
        stopped.extend(pid for pid, line in bench.lab.processes("train").items() if "sftp-server" in line)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    moved = bench.move(drafter, on_bytes=Once(stop))
    assert stopped
    for pid in stopped:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    assert moved.report.sha256 == hashlib.sha256(bench.arrived(drafter).read_bytes()).hexdigest()
