"""What hidden states cost: beside a bare forward, and read layer by layer beside a target loaded whole.

    python tests/benchmarks/bench_extraction.py [--json] [--rounds 2] [--directory DIR]

A seeded random hybrid target of more than 800 million parameters (bfloat16, 1.7 GB in shards) in a temporary directory, on
one thread. Processor seconds, interleaved; memory is the peak of a fresh process, interpreter and libraries included.
"""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from reporting import Row, arguments, as_text, report, row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash_model.target.backbone import Backbone, load_backbone
from dflash_model.target.extraction import open_target
from dflash_model.target.fidelity import Thresholds, measure
from dflash_model.target.hidden_states import extract, run_forward
from dflash_model.target.references import LENGTH, Reference
from dflash_model.target.tables import TABLES_NAME, load_tables, write_tables
from dflash_model.target.weight_files import open_weights

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 24, "vocab_size": 65536, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TAPS = (2, 8, 14, 20)
LENGTHS = (40, 24)
PROMPT = 16
"""Of each sequence's tokens; the rest is what the gate judges."""


def make_target(directory: Path) -> None:
    """Save the target and its tables."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_5_text", **CONFIG)
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory / "target", max_shard_size="200MB")
    (directory / "tables").mkdir(exist_ok=True)
    write_tables(directory / "target", directory / "tables")


def sequences() -> list[list[int]]:
    """Seeded token ids."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, CONFIG["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]


def child(directory: Path, mode: str) -> dict[str, float]:
    """Open the target in `mode` and extract every sequence: processor seconds and peak resident memory of this process."""
    torch.set_num_threads(1)
    started = time.process_time()
    target = open_target(directory / "target", dtype="bfloat16", extraction=mode)
    rows = sum(len(captured.final) for captured in target.extract(sequences(), TAPS))
    if rows != sum(LENGTHS) or target.choice.mode != mode:
        raise AssertionError(mode)
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert peak is not None
    return {"cpu_s": time.process_time() - started, "peak_mib": int(peak[1]) / 1024}


def streaming_rows(directory: Path, rounds: int) -> list[Row]:
    """Fresh processes, full and streaming in turns."""
    found: dict[str, list[dict[str, float]]] = {"full": [], "streaming": []}
    for _ in range(rounds):
        for mode, answers in found.items():
            command = [sys.executable, __file__, "--child", mode, "--directory", str(directory)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            answers.append(json.loads(done.stdout.splitlines()[-1]))
    peak = {mode: max(answer["peak_mib"] for answer in answers) for mode, answers in found.items()}
    cpu = {mode: median(answer["cpu_s"] for answer in answers) for mode, answers in found.items()}
    return [
        row("streaming_rss_ratio", peak["streaming"] / peak["full"], "ratio", most=0.30),
        row("streaming_cpu_ratio", cpu["streaming"] / cpu["full"], "ratio", most=1.10),
        *(row(f"{mode}_peak_memory", peak[mode], "MiB", digits=0) for mode in found),
        *(row(f"{mode}_cpu", cpu[mode], "s", digits=1) for mode in found),
    ]


def seconds(act: Callable[[], Any]) -> float:
    """Processor seconds of one call."""
    started = time.process_time()
    act()
    return time.process_time() - started


def forward_rows(directory: Path, rounds: int) -> list[Row]:
    """In one process: a bare forward, an extraction and the gate in turns, on each sequence."""
    backbone = load_backbone(directory / "target", dtype="bfloat16")
    tables = load_tables(directory / "tables")
    ratios, gates = [], []
    for ids in sequences():
        extract(backbone, ids, TAPS)
        bare, ours, gate = [], [], []
        for _ in range(rounds + 1):
            bare.append(seconds(lambda ids=ids: run_forward(backbone, ids)))
            ours.append(seconds(lambda ids=ids: extract(backbone, ids, TAPS)))
            final = extract(backbone, ids, TAPS).final
            gate.append(seconds(lambda ids=ids, final=final: judge(final, ids, tables)))
        ratios.append(min(ours) / min(bare))
        gates.append(min(gate) / (min(ours) + min(gate)))
    held, whole = held_bytes(backbone, sequences()[0])
    return [
        row("cpu_vs_bare_forward", median(ratios), "ratio", most=1.05),
        row("gate_cpu_share", median(gates), "share"),
        row("held_bytes_vs_full_tuple", held / whole, "ratio", most=0.3),
        row("held_bytes", held / 1024, "KiB", digits=0),
        row("full_tuple_bytes", whole / 1024, "KiB", digits=0),
    ]


def judge(final: torch.Tensor, ids: list[int], tables: Any) -> None:
    """What the gate does with a sample (of random weights: it fails, and looks for causes, which costs it more)."""
    completion = tuple(ids[PROMPT:])
    reference = Reference(
        sample_id="a", prompt_ids=tuple(ids[:PROMPT]), completion_ids=completion, overshoot_ids=(), finish=LENGTH,
        logprobs=(-1.0,) * len(completion), engine="x",
    )  # fmt: skip
    measure(final, ids, reference=reference, tables=tables, thresholds=Thresholds())


def held_bytes(backbone: Backbone, ids: list[int]) -> tuple[int, int]:
    """Live bytes that an extraction and a forward with the whole tuple leave behind, counted over all tensors there are."""
    before = live_bytes()
    captured = extract(backbone, ids, TAPS)
    held = live_bytes() - before
    del captured
    before = live_bytes()
    output = run_forward(backbone, ids, output_hidden_states=True)
    whole = live_bytes() - before
    del output
    return held, whole


def live_bytes() -> int:
    """Bytes of all storages of living tensors, each storage once."""
    gc.collect()
    return sum({storage.data_ptr(): storage.nbytes() for storage in living()}.values())


def living() -> Iterable[torch.UntypedStorage]:
    """The storage of every tensor that the interpreter knows."""
    return [thing.untyped_storage() for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", choices=("full", "streaming"))
    parser.add_argument("--directory", type=Path, help="where the target is made, or lies from an earlier run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(child(options.directory, options.child)))
        return
    with tempfile.TemporaryDirectory() as name:
        directory = options.directory or Path(name)
        if not (directory / "tables" / TABLES_NAME).is_file():
            make_target(directory)
        parameters = open_weights(directory / "target").parameter_bytes(torch.bfloat16) / 2
        rows = [row("parameters", parameters / 1e6, "M", least=800, digits=0)]
        for measured in (streaming_rows, forward_rows):
            found = measured(directory, options.rounds)
            print(*map(as_text, found), sep="\n", file=sys.stderr, flush=True)
            rows += found
    report("extraction", rows, packages=("torch", "transformers", "safetensors"), as_json=options.json)


if __name__ == "__main__":
    main()
