"""Stage hidden-states: one prefill a sample, the wanted layers, behind the fidelity gate.

Parameters: taps (hidden-state tuple indices), dtype. Each sample's layers are an artifact of their own, named by target
weights, tokens and dtype: a superset serves a subset, and a new tap computes only its own layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_model.artifacts import Manifest
from dflash_model.digests import json_digest
from dflash_model.stages.protocol import Context
from dflash_model.stages.target_directory import target_directory
from dflash_model.storage import artifacts_dir, find_artifact, write_json, writing_artifact
from dflash_model.target.backbone import Backbone, load_backbone, parse_dtype
from dflash_model.target.fidelity import SampleFidelity, Thresholds, measure
from dflash_model.target.fidelity_report import judge, require_faithful
from dflash_model.target.hidden_states import extract
from dflash_model.target.kernels import describe_backend
from dflash_model.target.layer_checks import LayerCheck, check_layers
from dflash_model.target.references import Reference, read_references
from dflash_model.target.states_file import SampleStates, write_states
from dflash_model.target.tables import Tables, load_tables

STATES_FILE = "states.safetensors"
CHECK_TOKENS = 48


def run(context: Context) -> None:
    """Extract what is missing, judge everything, write the list of parts. Raises NotEvaluable where the gate fails."""
    references = read_references(context.input_path("references") / "references.jsonl")
    extractor = _Extractor(context, references)
    samples: dict[str, list[Manifest]] = {}
    for done, reference in enumerate(references):
        samples[reference.sample_id] = extractor.parts(reference)
        context.progress(done + 1, len(references), "prompts")
    measured = [_fidelity(parts, sample_id) for sample_id, parts in samples.items()]
    report = judge(measured, thresholds=extractor.thresholds, checks=extractor.checks(), backend=extractor.backend(samples))
    context.milestone(f"fidelity {report.verdict}, {extractor.forwards} forward passes; {' '.join(report.reasons)}".rstrip("; "))
    require_faithful(report)
    with context.writing() as writer:
        content = report.to_json()
        write_json(writer.path / "fidelity.json", content)
        writer.parts |= {part.key: part.digest for parts in samples.values() for part in parts}
        writer.facts |= {
            "taps": context.parameters["taps"],
            "dtype": context.parameters["dtype"],
            "samples": {sample_id: [part.key for part in parts] for sample_id, parts in samples.items()},
            "fidelity": {name: content[name] for name in ("verdict", "reasons", "n", "agree", "hard_rate", "max_gap_nats")},
            "backend": extractor.backend(samples),
        }
        writer.made_by |= {"forwards": extractor.forwards}


def _fidelity(parts: Sequence[Manifest], sample_id: str) -> SampleFidelity:
    return SampleFidelity.from_json(parts[0].facts["fidelity"] | {"sample_id": sample_id})


class _Extractor:
    """Finds or makes the parts of each sample; the target is loaded when the first one is missing."""

    def __init__(self, context: Context, references: Sequence[Reference]) -> None:
        self._context = context
        self._root = artifacts_dir(context.request.work_dir)
        self._taps: list[int] = context.parameters["taps"]
        self._dtype: str = context.parameters["dtype"]
        self._weights = context.input_manifest("target").facts["weights_digest"]
        self._others = {reference.sample_id: reference for reference in references}
        self._first = references[0]
        self._backbone: Backbone | None = None
        self._tables: Tables | None = None
        self._checks: tuple[LayerCheck, ...] = ()
        self.thresholds = Thresholds()
        self.forwards = 0

    def parts(self, reference: Reference) -> list[Manifest]:
        """Artifacts that together hold the wanted taps of one sample, fewest first found."""
        family = f"states-{json_digest([self._weights, reference.token_digest, self._dtype])[:24]}"
        chosen, covered = ([], set()) if self._context.local.get("fresh") else self._existing(family)
        missing = sorted(set(self._taps) - covered)
        if missing:
            chosen.append(self._make(reference, family, missing))
        return chosen

    def _existing(self, family: str) -> tuple[list[Manifest], set[int]]:
        """Parts of the family that hold wanted taps; those with more of them first, none that adds nothing."""
        found = [find_artifact(self._context.request.work_dir, path.name) for path in sorted(self._root.glob(f"{family}-t*"))]
        usable = [manifest for manifest in found if manifest is not None]
        usable.sort(key=lambda manifest: -len(set(manifest.facts["taps"]) & set(self._taps)))
        chosen: list[Manifest] = []
        covered: set[int] = set()
        for manifest in usable:
            adds = (set(manifest.facts["taps"]) & set(self._taps)) - covered
            if adds:
                chosen.append(manifest)
                covered |= adds
        return chosen, covered

    def _make(self, reference: Reference, family: str, taps: list[int]) -> Manifest:
        backbone, tables = self._loaded()
        captured = extract(backbone, reference.token_ids, taps)
        self.forwards += 1
        fidelity = measure(
            captured.final,
            reference.token_ids,
            reference=reference,
            tables=tables,
            thresholds=self.thresholds,
            others=self._others,
        )
        key = f"{family}-t{'.'.join(map(str, taps))}"
        backend = describe_backend(backbone)
        with writing_artifact(self._context.request.work_dir, kind="sample_states", key=key) as writer:
            import torch

            states = SampleStates(
                sample_id=reference.sample_id,
                token_ids=reference.token_ids,
                tap_indices=tuple(taps),
                hidden_states=torch.stack([captured.taps[tap] for tap in taps], dim=1),
                target_digest=self._weights,
                backend=backend,
            )
            write_states(writer.path / STATES_FILE, states)
            writer.facts |= {"taps": taps, "fidelity": fidelity.to_json(), "backend": backend}
        made = find_artifact(self._context.request.work_dir, key)
        assert made is not None
        return made

    def _loaded(self) -> tuple[Backbone, Tables]:
        if self._backbone is None or self._tables is None:
            self._context.milestone("loading the target")
            directory = target_directory(self._context)
            device = str(self._context.local.get("device", "cpu"))
            self._backbone = load_backbone(directory, dtype=self._dtype, device=device)
            self._tables = load_tables(self._context.input_path("tables"), parse_dtype("float32"))
            prompt = self._first.token_ids[:CHECK_TOKENS]
            self._checks = tuple(check_layers(self._backbone, prompt, self._taps, tables=self._tables))
        return self._backbone, self._tables

    def checks(self) -> tuple[LayerCheck, ...]:
        """The exact checks of this loading of the target; () where every part was there already."""
        return self._checks

    def backend(self, samples: dict[str, list[Manifest]]) -> dict[str, Any]:
        """Kernels and versions that computed the first sample's states."""
        parts = next(iter(samples.values()))
        backend: dict[str, Any] = parts[0].facts["backend"]
        return backend
