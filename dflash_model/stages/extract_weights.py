"""Stage extract-weights: from a training checkpoint or a drafter directory to model.safetensors and a DrafterSpec.

Parameters: source_digest, form ("torch" | "directory" | "dcp"), tokenizer_sha256, cast where it is not "keep", and for a
checkpoint without a config of its own: state_key, config, config_from, options. Local: path, and whether the tensors there
have been taken out already, on their way here. No torch: the symbolic reader finds the tensors, their bytes are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_model.checkpoint.extract import ExtractReport, extract_weights, extract_weights_from_dir
from dflash_model.checkpoint.extracted import adopt_extracted
from dflash_model.checkpoint.open_table import open_table
from dflash_model.checkpoint.source import LocalFile
from dflash_model.checkpoint.step import step_of
from dflash_model.drafter.building import Reading
from dflash_model.drafter.reading import GivenConfig, read_directory, read_training_file, tensors_of
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.stages.protocol import Context
from dflash_model.target.model_directory import read_json_file

WEIGHTS_FILE = "model.safetensors"


def run(context: Context) -> None:
    """Copy the drafter's tensors, then read its spec from their shapes and whatever config there is."""
    chosen = context.parameters
    path = Path(context.local["path"])
    with context.writing() as writer:
        weights = writer.path / WEIGHTS_FILE
        report, moved = _weights(context, path, weights)
        reading = _read(path, weights, chosen, report)
        writer.facts |= {
            "spec": reading.spec.to_json(),
            "warnings": list(reading.warnings),
            "step": step_of(report.facts),
            "source_digest": chosen["source_digest"],
            "tokenizer_sha256": chosen["tokenizer_sha256"],
            "dropped": report.dropped,
        }
        writer.made_by |= {"bytes_read": report.bytes_read, "bytes_skipped": report.bytes_skipped} | moved
    context.milestone(
        f"{report.tensors} tensors, {report.bytes_written / 1e6:.1f} MB kept, {report.bytes_skipped / 1e6:.1f} MB left behind"
    )
    for warning in reading.warnings:
        context.milestone(f"warning: {warning}")


def _weights(context: Context, path: Path, weights: Path) -> tuple[ExtractReport, dict[str, Any]]:
    """Write the weights; (what was taken out, how it was moved here)."""
    chosen = context.parameters
    if context.local.get("extracted"):
        found = adopt_extracted(path, weights)
        return found.report, {"relay": found.transfer}
    key, cast = chosen.get("state_key"), chosen.get("cast", "keep")
    if path.is_dir():
        # What a drafter with a config holds is its own; a training state also carries the target's frozen tables.
        keep_vocab = chosen["form"] == "directory"
        return extract_weights_from_dir(path, weights, key=key, cast=cast, keep_vocab=keep_vocab), {}
    with LocalFile(path) as source:
        return extract_weights(source, weights, key=key, cast=cast), {}


def _read(path: Path, weights: Path, chosen: Mapping[str, Any], report: ExtractReport) -> Reading:
    """The drafter's form, from the tensors that were written and whatever config there is."""
    with LocalFile(weights) as source:
        tensors = tensors_of(open_table(source))
        if chosen["form"] == "directory":
            return read_directory(
                tensors, read_json_file(path / "config.json"), beside=sorted(one.name for one in path.iterdir())
            )
        config_from = chosen["config_from"]
        given = GivenConfig(
            config=chosen["config"],
            config_from=DrafterSpec.from_json(config_from) if config_from is not None else None,
            options=chosen["options"],
        )
        return read_training_file(tensors, report.facts, report.dropped, given)
