"""What moving a training checkpoint between two hosts costs, beside the pipes of OpenSSH that one would type.

    python tests/benchmarks/bench_relay.py [--json] [--megabytes 408] [--rounds 3] [--sparse-megabytes 4096]

Needs what the lab needs (root, sshd, iproute2), and ssh. The checkpoint: seeded weights of 1 MiB tensors, a third of the file;
AdamW's two moments are the rest. Rounds are interleaved in random order, figures are medians. All ends share this machine's
cores, so trust the ratios. Ours is a fresh process without torch each time: its wall time begins before it connects and ends
with the renamed, hashed file; its processor time and memory are the whole process's.

selective_wall_ratio    relay of the drafter : `ssh A cat | ssh B 'cat >'` of the whole file, then torch.load and save_file on B
selective_bytes_ratio   bytes read from A : bytes of the selected tensors
bf16_bytes_ratio        bytes written to B with a cast to bf16 : the same without
file_vs_default_pipe    MB/s of the whole-file plane (hashed on the way) : that of the pipe with OpenSSH's default cipher
file_vs_gcm_pipe        the same : that of the pipe with aes128-gcm
relay_cpu               processor seconds per GB on the relay, of the whole-file plane and of the gcm pipe
relay_rss_mb            largest resident set of our process, at the checkpoint's size and with a sparse one of 4 GB
"""

from __future__ import annotations

import json
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "deployments" / "lab")]

MIB = 1 << 20
CONVERT = (
    "import sys, torch; from safetensors.torch import save_file;"
    "save_file(torch.load(sys.argv[1], weights_only=True, map_location='cpu')['model_state_dict'], sys.argv[2])"
)


def main() -> None:
    """Measure and print; with --child, be the process that is measured."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(*sys.argv[2:])))
        return
    from reporting import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=408)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sparse-megabytes", type=int, default=4096)
    options = parser.parse_args()
    from lab import Lab, why_impossible

    if (reason := why_impossible()) is not None:
        raise SystemExit(f"{reason}.")
    with tempfile.TemporaryDirectory() as directory:
        lab = Lab(Path(directory) / "lab")
        try:
            lab.up()
            rows = measure(
                Bench(lab, Path(directory)), megabytes=options.megabytes, rounds=options.rounds, sparse=options.sparse_megabytes
            )
        finally:
            lab.down()
    report("relay", rows, packages=("paramiko", "cryptography", "numpy", "torch"), as_json=options.json)


def child(what: str, hosts_file: str, home: str, path: str, cast: str) -> dict[str, Any]:
    """One transfer in this process: "selective" or "file"."""
    from tasks.remote.drafters import discover
    from tasks.remote.inventory import read_inventory
    from tasks.remote.opening import open_host
    from tasks.remote.selection import Selection
    from tasks.remote.selective import relay

    inventory = read_inventory(Path(hosts_file), home=Path(home))
    train, evaluator = (open_host(inventory.entry(name)).host for name in ("train", "eval"))
    drafter = discover(train, path, settle_s=0.0)
    train.close()
    figures: dict[str, Any] = {}
    began, cpu = time.monotonic(), time.process_time()
    if what == "selective":
        moved = relay(drafter, Selection(cast=cast), train, evaluator, journals=Path(home), on_bytes=lambda *_: None)  # type: ignore[arg-type]
        assert moved is not None
        figures |= {
            "read": moved.transfer["bytes_read"],
            "written": moved.transfer["bytes_written"],
            "sha256": moved.report.sha256,
        }
    else:
        evaluator.write_blocks(evaluator.work_dir / "file", hashed(train.read_blocks(PurePosixPath(path)), figures))
    figures |= {"wall_s": time.monotonic() - began, "cpu_s": time.process_time() - cpu}
    assert "torch" not in sys.modules
    # Not ru_maxrss, which still knows of the process that this one was forked from.
    status = Path("/proc/self/status").read_text()
    return figures | {"rss_mb": int(status.partition("VmHWM:")[2].split()[0]) / 1024}


def hashed(blocks: Any, figures: dict[str, Any]) -> Any:
    """The blocks, their sha256 noted at the end."""
    import hashlib

    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
        yield block
    figures["sha256"] = digest.hexdigest()


class Bench:
    """The lab, and each way to move a file through it."""

    def __init__(self, lab: Any, directory: Path) -> None:
        self.lab = lab
        self.home = directory / "home"
        self.path = lab.work / "step.pt"
        self.sizes: dict[str, int] = {}

    def put(self, name: str, megabytes: int, *, sparse: bool) -> None:
        """A training state of that size on the training host."""
        import contextlib

        import torch

        torch.manual_seed(1)
        count = max(1, megabytes // 3)
        make = torch.empty if sparse else torch.randn
        weights = {f"layers.{i}.mlp.up_proj.weight": make(512, 512) for i in range(count)}
        moments = {
            i: {"exp_avg": w * 0.1, "exp_avg_sq": w * w, "step": torch.tensor(9.0)} for i, w in enumerate(weights.values())
        }
        state = {"model_state_dict": weights, "optimizer_state_dict": {"state": moments}, "step": 9}
        path = self.lab.disk("train") / "work" / name
        with torch.serialization.skip_data() if sparse else contextlib.nullcontext():
            torch.save(state, path)
        os.utime(path, ns=(10**18, 10**18))
        self.sizes[name] = path.stat().st_size

    def ssh(self, host: str, *options: str) -> str:
        """The command line up to the remote command."""
        given = [
            "-i",
            str(self.lab.key),
            "-o",
            f"UserKnownHostsFile={self.lab.known_hosts}",
            "-o",
            "IdentitiesOnly=yes",
            *options,
        ]
        return shlex.join(["ssh", "-F", "none", *given, f"root@{self.lab.hosts[host].address}"])

    def pipe(self, *options: str) -> dict[str, float]:
        """`ssh A cat | ssh B 'cat >'`."""
        to = self.lab.work / "piped"
        command = f"{self.ssh('train', *options)} cat {self.path} | {self.ssh('eval', *options)} 'cat > {to}'"
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(["sh", "-c", command], check=True)
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if (self.lab.disk("eval") / "work" / "piped").stat().st_size != self.sizes["step.pt"]:
            raise AssertionError("the pipe lost something")
        return {"wall_s": wall, "cpu_s": cpu}

    def convert(self) -> dict[str, float]:
        """torch on B, as one would without this program."""
        script = shlex.join([sys.executable, "-c", CONVERT, str(self.lab.work / "piped"), str(self.lab.work / "converted")])
        began = time.monotonic()
        subprocess.run(["sh", "-c", f"{self.ssh('eval')} {shlex.quote(script)}"], check=True)
        return {"wall_s": time.monotonic() - began}

    def ours(self, what: str, *, name: str = "step.pt", cast: str = "keep") -> dict[str, Any]:
        """One of our transfers in a process of its own; nothing of an earlier one is there."""
        subprocess.run(["rm", "-rf", str(self.lab.disk("eval") / "work" / "incoming"), str(self.home)], check=True)
        command = [
            sys.executable,
            __file__,
            "--child",
            what,
            str(self.lab.hosts_file),
            str(self.home),
            str(self.lab.work / name),
            cast,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(bench: Bench, *, megabytes: int, rounds: int, sparse: int) -> list[dict[str, Any]]:
    """All rows."""
    from reporting import row

    bench.put("step.pt", megabytes, sparse=False)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "default": bench.pipe,
        "gcm": lambda: bench.pipe("-c", "aes128-gcm@openssh.com"),
        "file": lambda: bench.ours("file"),
        "selective": lambda: bench.ours("selective"),
        "bf16": lambda: bench.ours("selective", cast="bf16"),
    }
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in [*ways, "convert"]}
    for number in range(rounds):
        order = list(ways)
        random.Random(number).shuffle(order)
        for name in order:
            seen[name].append(ways[name]())
            if name == "default":
                seen["convert"].append(bench.convert())
            print(f"round {number + 1}: {name} {seen[name][-1]['wall_s']:.2f} s", file=sys.stderr, flush=True)
    same_as_torchs(bench)
    bench.put("sparse.pt", sparse, sparse=True)
    large = bench.ours("selective", name="sparse.pt")

    def middle(name: str, figure: str) -> float:
        return median(float(one[figure]) for one in seen[name])

    gigabytes = bench.sizes["step.pt"] / 1e9
    selected = (megabytes // 3) * MIB
    baseline = [pipe["wall_s"] + convert["wall_s"] for pipe, convert in zip(seen["default"], seen["convert"], strict=True)]
    rss = max(one["rss_mb"] for one in seen["selective"])
    return [
        row("selective_wall_ratio", middle("selective", "wall_s") / median(baseline), "x", most=0.50),
        row("selective_bytes_ratio", middle("selective", "read") / selected, "x", most=1.01, digits=4),
        row("bf16_bytes_ratio", middle("bf16", "written") / middle("selective", "written"), "x", most=0.51, digits=4),
        row("file_vs_default_pipe", middle("default", "wall_s") / middle("file", "wall_s"), "x", least=1.0),
        row("file_vs_gcm_pipe", middle("gcm", "wall_s") / middle("file", "wall_s"), "x", least=0.75),
        row("relay_cpu_s_per_gb", middle("file", "cpu_s") / gigabytes, "s/GB"),
        row("relay_cpu_vs_gcm_pipe", middle("file", "cpu_s") / middle("gcm", "cpu_s"), "x"),
        row("relay_rss_mb", rss, "MB", most=200, digits=1),
        row("relay_rss_mb_4gb_sparse", large["rss_mb"], "MB", most=200, digits=1),
        row("relay_rss_growth", large["rss_mb"] / rss, "x", most=1.15),
        row("selective_wall", middle("selective", "wall_s"), "s"),
        row("baseline_wall", median(baseline), "s"),
        row("file_rate", bench.sizes["step.pt"] / 1e6 / middle("file", "wall_s"), "MB/s", digits=1),
    ]


def same_as_torchs(bench: Bench) -> None:
    """What ours wrote last without a cast must hold what torch's conversion holds."""
    import torch
    from safetensors.torch import load_file

    bench.ours("selective")
    work = bench.lab.disk("eval") / "work"
    (ours,) = work.glob("incoming/*/model.safetensors")
    theirs, found = load_file(work / "converted"), load_file(ours)
    if set(theirs) != set(found) or not all(torch.equal(tensor, found[name]) for name, tensor in theirs.items()):
        raise AssertionError("the tensors differ")


if __name__ == "__main__":
    main()
