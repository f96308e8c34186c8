"""What reading a checkpoint costs: indexing 20,000 tensors, and extracting a drafter, beside torch doing the same.

    python tests/benchmarks/bench_checkpoint_reader.py [--json] [--megabytes 256]

With --json the last line of stdout is {"name", "machine", "versions", "results"}. Files lie in a temporary directory
and in the page cache, so the seconds are the processor's.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from reporting import Row, arguments, report, row
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash_model.checkpoint.extract import extract_weights
from dflash_model.checkpoint.source import LocalFile
from dflash_model.checkpoint.torch_file import read_torch_file

ROOT = Path(__file__).resolve().parents[2]
TENSORS = 20_000
INDEX_BAR_S = 3.0
ROUNDS = 3


def timed(act: Callable[[], Any]) -> float:
    """CPU seconds of the fastest of ROUNDS runs."""
    seconds = []
    for _ in range(ROUNDS):
        started = time.process_time()
        act()
        seconds.append(time.process_time() - started)
    return min(seconds)


def index(path: Path) -> int:
    """Directory, pickle, tensors by path, plain data, digest."""
    with LocalFile(path) as source:
        file = read_torch_file(source)
        file.plain()
        file.content_digest()
        return len(file.by_path())


def indexing(directory: Path) -> list[Row]:
    """20,000 tensors of two elements each, zip and legacy."""
    state = {f"layers.{i // 100}.part{i % 100}.weight": torch.zeros(2) for i in range(TENSORS)}
    rows = []
    for form, options in (("zip", {}), ("legacy", {"_use_new_zipfile_serialization": False})):
        path = directory / f"{form}.pt"
        torch.save({"model_state_dict": state, "step": 1}, path, **options)
        if index(path) != TENSORS:
            raise AssertionError(form)
        rows.append(row(f"index_20000_tensors_{form}", timed(lambda path=path: index(path)), "s", most=INDEX_BAR_S))
    load = timed(lambda: torch.load(directory / "zip.pt", weights_only=True))
    return [
        *rows,
        row("torch_load_20000_tensors", load, "s"),
        row("index_peak_memory", peak_megabytes(directory / "zip.pt"), "MB"),
    ]


def peak_megabytes(path: Path) -> float:
    """Peak resident memory of a fresh interpreter that indexes the file, without torch, less that of one that only imports."""
    program = (
        "import re, sys; from pathlib import Path; from dflash_model.checkpoint.source import LocalFile;"
        "from dflash_model.checkpoint.torch_file import read_torch_file;"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]);"
        "before = peak();"
        "file = read_torch_file(LocalFile(Path(sys.argv[1]))); file.plain(); file.content_digest();"
        "assert 'torch' not in sys.modules;"
        "print((peak() - before) / 1024)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], cwd=ROOT, capture_output=True, text=True, check=True)
    return float(done.stdout)


def extraction(directory: Path, megabytes: int) -> list[Row]:
    """A training state of `megabytes` whose drafter is a third of it, to safetensors: this reader and torch."""
    rows = max(1, megabytes * (1 << 20) // 3 // 4 // 1024 // 24)
    weights = {f"layers.{i}.weight": torch.randn(rows, 1024) for i in range(24)}
    moments = {i: {"exp_avg": w + 1, "exp_avg_sq": w + 2} for i, w in enumerate(weights.values())}
    path, ours, theirs = directory / "train.pt", directory / "ours.safetensors", directory / "theirs.safetensors"
    torch.save({"model_state_dict": weights, "optimizer_state_dict": {"state": moments}, "step": 1}, path)

    def extract() -> None:
        with LocalFile(path) as source:
            extract_weights(source, ours)

    def with_torch() -> None:
        save_file(torch.load(path, weights_only=True)["model_state_dict"], theirs)

    seconds = {"extract": timed(extract), "torch_load_and_save_file": timed(with_torch)}
    if any(not torch.equal(tensor, weights[name]) for name, tensor in load_file(ours).items()):
        raise AssertionError("extraction differs")
    with LocalFile(path) as source:
        extracted = extract_weights(source, ours)
    size = path.stat().st_size
    return [
        *(row(f"{name}_{megabytes}_mb_training_state", value, "s") for name, value in seconds.items()),
        row("share_of_the_file_read", extracted.bytes_read / size, "share", most=0.35),
    ]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        rows = indexing(Path(directory)) + extraction(Path(directory), options.megabytes)
    print(f"peak memory of this program: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024} MB", file=sys.stderr)
    report("checkpoint_reader", rows, packages=("numpy", "torch"), as_json=options.json)


if __name__ == "__main__":
    main()
