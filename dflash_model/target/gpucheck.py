"""Are hidden states on this GPU right, quick and small? A seeded hybrid model on it, against float32 on the CPU.

    python -m dflash_model.target.gpucheck [--device cuda|cpu] [--json]

Once with the linear-attention kernels that are installed and once with them hidden, each in a process of its own, since
transformers chooses at import. The weights are random: distances between states mean something, agreement of the best
tokens little (their margins are small), so it is shown and not judged. Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

KERNEL_PACKAGES = ("fla", "causal_conv1d")
WITH, WITHOUT = "installed kernels", "torch fallback"
WORST_L2 = 5e-2
"""bfloat16 against float32: correct paths were up to 1.7e-2 apart over 8 layers; a wrong computation about 1."""
SIZES = {
    "cuda": {"hidden_size": 1024, "layers": 24, "vocab_size": 65536, "tokens": 1024},
    "cpu": {"hidden_size": 64, "layers": 4, "vocab_size": 512, "tokens": 160},
}
CHILD_TIMEOUT_S = {"cuda": 75, "cpu": 600}
"""The table is promised within three minutes on a GPU; the dry run may share its processor with anything."""
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0: all rows hold or there is no GPU, 1: one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a small dry run of the same steps")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--child", metavar="DIR", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--hide-kernels", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(_measure(options.child, options.device, hide=options.hide_kernels)))
        return 0
    found = check(options.device)
    for row in found["rows"]:
        print(_as_text(row))
    if found["skipped"]:
        print(f"skipped: {found['skipped']}")
    if options.json:
        print(json.dumps(found))
    return 1 if any(row.get("holds") is False for row in found["rows"]) else 0


def check(device: str) -> dict[str, Any]:
    """{name, machine, device, versions, model, rows, skipped}: the table as one JSON value."""
    import torch

    from dflash_model.target.kernels import library_versions

    found: dict[str, Any] = {
        "name": "gpucheck",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{platform.machine()}, {platform.system()}",
        "device": device,
        "versions": library_versions(),
        "rows": [],
        "skipped": None,
    }
    if device == "cuda":
        if not torch.cuda.is_available():
            return found | {"skipped": "torch sees no GPU here"}
        found["device"] = torch.cuda.get_device_name(0)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        found["model"] = make_model(directory, **SIZES[device])
        for label, hide in ((WITH, False), (WITHOUT, True)):
            missing = [package for package in KERNEL_PACKAGES if find_spec(package) is None]
            if not hide and len(missing) == len(KERNEL_PACKAGES):
                found["rows"].append({"variant": label, "skipped": f"not installed: {', '.join(missing)}"})
                continue
            found["rows"].append({"variant": label} | _run_child(directory, device, hide=hide))
    return found


def make_model(directory: Path, *, hidden_size: int, layers: int, vocab_size: int, tokens: int) -> dict[str, int]:
    """Save a seeded random hybrid model to `directory`, and what the CPU computes with it in float32."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from dflash_model.target.backbone import backbone_of
    from dflash_model.target.hidden_states import extract

    torch.manual_seed(0)
    heads = max(1, hidden_size // 64)
    config = transformers.AutoConfig.for_model(
        "qwen3_5_text", hidden_size=hidden_size, intermediate_size=3 * hidden_size, num_hidden_layers=layers,
        vocab_size=vocab_size, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), head_dim=64,
        linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=max(1, heads // 2), linear_num_value_heads=heads,
        max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    backbone = backbone_of(model.float().eval())
    ids = torch.randint(2, vocab_size, (tokens,)).tolist()
    taps = list(range(1, layers + 1))
    states = extract(backbone, ids, taps)
    with torch.no_grad():
        best = backbone.model.get_output_embeddings()(backbone.norm(states.final[None]))[0].argmax(-1)
    stacked = torch.stack([states.taps[tap] for tap in taps], dim=1)
    save_file({"token_ids": torch.tensor(ids), "hidden_states": stacked, "best": best}, directory / "reference.safetensors")
    return {"parameters": sum(p.numel() for p in model.parameters()), "layers": layers, "tokens": tokens}


def _run_child(directory: Path, device: str, *, hide: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "dflash_model.target.gpucheck", "--child", str(directory), "--device", device]
    if hide:
        command.append("--hide-kernels")
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S[device],
            check=False,
            env=os.environ | {"PYTHONPATH": _root()},
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer within {CHILD_TIMEOUT_S[device]} s", "holds": False}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"failed": lines[-1] if lines else f"exit code {done.returncode}", "holds": False}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _root() -> str:
    """Where this package lies, for a child that is started elsewhere."""
    return str(Path(__file__).resolve().parents[2])


def _measure(directory: Path, device: str, *, hide: bool) -> dict[str, Any]:
    """One row: this process's kernels on `device`."""
    if hide:
        for package in KERNEL_PACKAGES:
            sys.modules[package] = None  # type: ignore[assignment]
    import torch
    from safetensors.torch import load_file

    from dflash_model.target.backbone import load_backbone
    from dflash_model.target.hidden_states import extract, run_forward
    from dflash_model.target.kernels import kernel_choices
    from dflash_model.target.layer_checks import relative_l2
    from dflash_model.target.streaming import extract_streamed, open_streamed

    wanted = load_file(directory / "reference.safetensors")
    ids = wanted["token_ids"].tolist()
    taps = list(range(1, wanted["hidden_states"].shape[1] + 1))
    backbone = load_backbone(directory, dtype="bfloat16", device=device)
    weights = sum(p.numel() * p.element_size() for p in backbone.model.parameters())
    states = extract(backbone, ids, taps)
    distances = [relative_l2(states.taps[tap], wanted["hidden_states"][:, tap - 1]) for tap in taps]
    with torch.no_grad():
        rows = backbone.norm(states.final[None].to(backbone.device))
        best = backbone.model.get_output_embeddings()(rows)[0].argmax(-1).cpu()
    few = [taps[0], taps[len(taps) // 2], taps[-1]]
    bare, hooked = _interleaved(lambda: run_forward(backbone, ids), lambda: extract(backbone, ids, few), device)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    (streamed,) = extract_streamed(open_streamed(directory, dtype="bfloat16", device=device), [ids], taps)
    worst = max(distances)
    return {
        "kernels": kernel_choices(backbone),
        "worst_relative_l2": worst,
        "worst_tap": taps[distances.index(worst)],
        "argmax_agreement": float((best == wanted["best"]).float().mean()),
        "extract_over_bare_forward": hooked / bare,
        "bare_forward_s": bare,
        "peak_over_weights": None if peak is None else peak / weights,
        "streaming_same_bits": all(torch.equal(streamed.taps[tap], states.taps[tap]) for tap in taps),
        "holds": worst <= WORST_L2,
    }


def _interleaved(bare: Callable[[], Any], hooked: Callable[[], Any], device: str) -> tuple[float, float]:
    """Seconds of the quickest run of each, taken in turns after one of each."""
    import torch

    def seconds(act: Callable[[], Any]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        act()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    pairs = [(seconds(bare), seconds(hooked)) for _ in range(ROUNDS + 1)][1:]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def _as_text(row: dict[str, Any]) -> str:
    """A row as a line for people."""
    for name in ("skipped", "failed"):
        if name in row:
            return f"{row['variant']:18} {name}: {row[name]}"
    peak = "-" if row["peak_over_weights"] is None else f"{row['peak_over_weights']:.2f} x weights"
    return (
        f"{row['variant']:18} worst relative L2 {row['worst_relative_l2']:.2g} (tap {row['worst_tap']}), "
        f"best tokens agree {row['argmax_agreement']:.3f}, {row['extract_over_bare_forward']:.2f} x a bare forward, "
        f"peak memory {peak}, streaming {'same bits' if row['streaming_same_bits'] else 'OTHER BITS'}"
    )


if __name__ == "__main__":
    sys.exit(main())
