"""Stage extract-weights: from a training checkpoint or a drafter directory to model.safetensors and a DrafterSpec.

Parameters: source_digest, form ("torch" | "directory"), tokenizer_sha256, and for a `.pt`: state_key, config, config_from,
options. Local: path. No torch: the symbolic reader finds the tensors, their bytes are copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_model.checkpoint.extract import ExtractReport, extract_weights, extract_weights_from_dir
from dflash_model.checkpoint.safetensors_file import read_safetensors_header
from dflash_model.checkpoint.source import LocalFile
from dflash_model.checkpoint.step import step_of
from dflash_model.drafter.bare import spec_from_bare
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.zlab import spec_from_zlab
from dflash_model.stages.protocol import Context
from dflash_model.target.model_directory import read_json_file

WEIGHTS_FILE = "model.safetensors"


def run(context: Context) -> None:
    """Copy the drafter's tensors, then read its spec from their shapes and whatever config there is."""
    chosen = context.parameters
    path = Path(context.local["path"])
    with context.writing() as writer:
        weights = writer.path / WEIGHTS_FILE
        if chosen["form"] == "directory":
            report = extract_weights_from_dir(path, weights)
            spec = spec_from_zlab(read_json_file(path / "config.json"), _shapes(weights))
        else:
            with LocalFile(path) as source:
                report = extract_weights(source, weights, key=chosen["state_key"])
            spec = _bare_spec(chosen, _shapes(weights), report)
        writer.facts |= {
            "spec": spec.to_json(),
            "step": step_of(report.facts),
            "source_digest": chosen["source_digest"],
            "tokenizer_sha256": chosen["tokenizer_sha256"],
            "dropped": report.dropped,
        }
        writer.made_by |= {"bytes_read": report.bytes_read, "bytes_skipped": report.bytes_skipped}
    context.milestone(
        f"{report.tensors} tensors, {report.bytes_written / 1e6:.1f} MB kept, {report.bytes_skipped / 1e6:.1f} MB left behind"
    )


def _shapes(weights: Path) -> dict[str, tuple[int, ...]]:
    with LocalFile(weights) as source:
        return {name: entry.shape for name, entry in read_safetensors_header(source, shard=weights.name).entries.items()}


def _bare_spec(chosen: Mapping[str, Any], shapes: dict[str, tuple[int, ...]], report: ExtractReport) -> DrafterSpec:
    saved = report.facts.get("args", report.facts.get("config"))
    config_from = chosen["config_from"]
    return spec_from_bare(
        shapes,
        saved_args=saved if isinstance(saved, dict) else None,
        config=chosen["config"],
        config_from=DrafterSpec.from_json(config_from) if config_from is not None else None,
        **chosen["options"],
    )
