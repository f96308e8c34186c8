"""Trains the zoo: every drafter of zoo.yaml that is not there, or was made by another config. One thread, no network.

    python deployments/zoo/build_zoo.py [NAME ...]

Runs lie below build/zoo, so an interrupted one goes on from its last checkpoint; a finished one is copied to
deployments/zoo/drafters.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from zoo_entries import BUILD, DRAFTERS, HERE, NOTES_NAME, PROMPTS, Entry, entries, read_table, target_directory
from zoo_prompts import draw, texts_of

from dflash_model.storage import write_json
from dflash_model.target.backbone import load_backbone
from dflash_model.target.prompts import load_tokenizer, read_prompts, render
from dflash_model.target.references import write_references
from dflash_model.target.stop_tokens import read_stop_ids
from dflash_model.training.answers import answer_prompts
from dflash_model.training.trainer import Trainer

log = logging.getLogger("zoo")


def made(entry: Entry) -> bool:
    """Whether every drafter of `entry` is there, of this very config."""
    return all(_digest_of(DRAFTERS / name) == entry.digest() for name, _ in entry.drafters())


def _digest_of(directory: Path) -> str | None:
    notes = directory / NOTES_NAME
    return json.loads(notes.read_text(encoding="utf-8"))["digest"] if notes.is_file() else None


def make_answers(table: Mapping[str, Any], target: str) -> None:
    """The target's own answers to the training prompts, once."""
    wanted, out = table["training_prompts"], BUILD / f"{target}.jsonl"
    if out.is_file():
        return
    directory = target_directory(table, target)
    unlike = texts_of(PROMPTS) | texts_of(HERE.parent / "demo" / "prompts.jsonl")
    drawn = draw(per_category=wanted["per_category"], seed=wanted["seed"], unlike=frozenset(unlike))
    prompts_file = BUILD / "prompts.jsonl"
    prompts_file.parent.mkdir(parents=True, exist_ok=True)
    prompts_file.write_text("".join(json.dumps(prompt) + "\n" for prompt in drawn), encoding="utf-8")
    tokenizer = load_tokenizer(directory)
    prompts = render(read_prompts(prompts_file), tokenizer, thinking=None, max_prompt_tokens=512)
    answers = answer_prompts(
        load_backbone(directory, dtype="float32"),
        prompts,
        stop_ids=read_stop_ids(directory, tokenizer),
        max_new_tokens=wanted["max_new_tokens"],
        batch=64,
        on_progress=lambda done, total: log.info("%s: %d of %d answers", target, done, total),
    )
    write_references(out, answers)


def train_entry(entry: Entry) -> None:
    """Train one entry (or go on with it) and copy its drafters into place."""
    started = time.process_time()
    trainer = Trainer(entry.config, resume=True)
    result = trainer.run()
    seconds = time.process_time() - started
    for name, step in entry.drafters():
        source = entry.config.out / "drafters" / f"step-{step:06d}"
        place = DRAFTERS / name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source, place)
        last = asdict(result.last) if result.last and step == entry.config.steps else _sample_at(entry, step)
        notes = {"what": entry.what, "target": entry.target, "step": step, "steps": entry.config.steps, "last": last}
        write_json(place / NOTES_NAME, notes | {"digest": entry.digest(), "fault": entry.config.fault})
    log.info("%s: %.0f CPU seconds", entry.name, seconds)


def _sample_at(entry: Entry, step: int) -> dict[str, Any] | None:
    """The last sample of metrics at or before `step`, from the run's telemetry."""
    lines = (entry.config.out / "telemetry.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [line for line in map(json.loads, lines) if "loss" in line and line["step"] <= step]
    if not samples:
        return None
    last = samples[-1]
    return {"step": last.pop("step"), "loss": last.pop("loss"), "metrics": last}


def main() -> None:
    """Train what is missing: one of each kind first, further seeds after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="entries to make; all without")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    table = read_table()
    wanted = [entry for entry in entries(table) if not options.names or entry.name in options.names]
    missing = sorted((entry for entry in wanted if not made(entry)), key=lambda entry: entry.config.seed)
    for target in dict.fromkeys(entry.target for entry in missing):
        make_answers(table, target)
    for number, entry in enumerate(missing, start=1):
        log.info("%s (%d of %d): %s", entry.name, number, len(missing), entry.what)
        train_entry(entry)


if __name__ == "__main__":
    main()
