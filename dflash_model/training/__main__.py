"""Train a drafter: python -m dflash_model.training CONFIG.yaml [--resume] [--out DIRECTORY]."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import replace
from pathlib import Path

from dflash_model.errors import EvalError
from dflash_model.training.config import read_config
from dflash_model.training.trainer import Line, train


def main(arguments: list[str] | None = None) -> int:
    """Run one config; returns the exit code of the error tree, 130 when interrupted."""
    parser = argparse.ArgumentParser(prog="python -m dflash_model.training", description=__doc__)
    parser.add_argument("config", type=Path, help="YAML, see dflash_model/training/config.py")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run's directory")
    parser.add_argument("--out", type=Path, help="write there instead of where the config says")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        config = read_config(options.config)
        config = config if options.out is None else replace(config, out=options.out)
        result = train(config, resume=options.resume, on_sample=_show)
    except EvalError as exc:
        print(f"{exc.problem}\n  fix: {exc.fix}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        print("Interrupted; --resume goes on from the last checkpoint.", file=sys.stderr)
        return 130
    print(f"trained to step {result.step}: {result.checkpoint} and {result.drafter}")
    return 0


def _show(line: Line) -> None:
    if "loss" in line:
        slots = " ".join("-" if rate is None else f"{rate:.2f}" for rate in line["slot_accuracy"])
        length = line["eal_runs"]
        print(
            f"step {line['step']:>6}  loss {line['loss']:.3f}  slots {slots}  run+1 {'-' if length is None else f'{length:.2f}'}"
        )
        return
    stages = "  ".join(f"{name} {share['busy']:.0%}" for name, share in line["stages"].items())
    print(f"step {line['step']:>6}  {line['tokens_per_s']:.0f} tokens/s  busy: {stages}  queued {line['queues']['states']}")


if __name__ == "__main__":
    sys.exit(main())
