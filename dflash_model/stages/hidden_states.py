"""Stage hidden-states: one prefill a sample, the wanted layers, behind the fidelity gate.

Parameters: taps (hidden-state tuple indices), dtype; optional: batch (sequences in one padded forward), thresholds (lines
of the gate that are moved), engine (states that a serving engine made). Local: device, extraction (auto | full |
streaming), max_gpu_memory_gib; they change where and how the same states are computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dflash_model.artifacts import Manifest
from dflash_model.digests import json_digest
from dflash_model.errors import NotEvaluable
from dflash_model.stages.engine_import import EngineImport
from dflash_model.stages.protocol import Context
from dflash_model.stages.sample_states import SampleStore, kept_checks, kept_fidelity
from dflash_model.stages.target_directory import target_directory
from dflash_model.storage import write_json
from dflash_model.target.backbone import skeleton
from dflash_model.target.extraction import OpenTarget, open_target
from dflash_model.target.fidelity import SampleFidelity, Thresholds, assess, measure, not_delivered
from dflash_model.target.fidelity_report import FAIL, KERNELS, UNEXPLAINED, FidelityReport, judge, require_faithful
from dflash_model.target.hidden_states import CapturedStates
from dflash_model.target.kernels import backend_digest, describe_backend
from dflash_model.target.layer_checks import CHECK_TOKENS, LayerCheck, check_layers
from dflash_model.target.prompts import load_tokenizer
from dflash_model.target.references import Reference, read_references
from dflash_model.target.room import AUTO
from dflash_model.target.tables import Tables, load_tables
from dflash_model.target.template_variants import try_templates

log = logging.getLogger(__name__)


def run(context: Context) -> None:
    """Extract what is missing, judge everything, write the list of parts. Raises NotEvaluable where the gate fails."""
    references = read_references(context.input_path("references") / "references.jsonl")
    work = _Work(context, references)
    samples = work.samples()
    report = work.judged(samples)
    said = f"fidelity {report.verdict}, {work.forwards} forward passes; {' '.join(report.reasons)}".rstrip("; ")
    context.milestone(said)
    for cause in report.causes:
        context.milestone(f"possible cause: {cause.name}: {cause.sentence}")
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
            "backend": work.backend_of(samples),
        }
        writer.made_by |= {"forwards": work.forwards, "extraction": work.choice}


class _Work:
    """Finds or makes the parts of each sample; the target is opened when the first one is missing."""

    def __init__(self, context: Context, references: Sequence[Reference]) -> None:
        self._context, self._references = context, references
        self._by_id = {reference.sample_id: reference for reference in references}
        self._taps: list[int] = context.parameters["taps"]
        self._dtype: str = context.parameters["dtype"]
        self._batch: int = context.parameters.get("batch", 1)
        self._weights = context.input_manifest("target").facts["weights_digest"]
        self._target: OpenTarget | None = None
        self._checks: tuple[LayerCheck, ...] = ()
        self._engine: dict[str, Any] | None = context.parameters.get("engine")
        self.thresholds = Thresholds.from_json(context.parameters.get("thresholds") or {})

    @cached_property
    def _directory(self) -> Path:
        return target_directory(self._context)

    @property
    def _device(self) -> str:
        return str(self._context.local.get("device", "cpu"))

    @cached_property
    def _backend(self) -> dict[str, Any]:
        """What this host would compute with, known without loading the target."""
        return describe_backend(skeleton(self._directory, dtype=self._dtype, device=self._device))

    @cached_property
    def _store(self) -> SampleStore:
        own = [backend_digest(self._backend), self._batch > 1]
        maker = json_digest(own if self._engine is None else ["engine", self._engine])
        return SampleStore(work_dir=self._context.request.work_dir, weights_digest=self._weights, maker=maker)

    @cached_property
    def _tables(self) -> Tables:
        """As stored and mapped: the gate converts the head a block at a time, so that it needs no room of its own."""
        return load_tables(self._context.input_path("tables"))

    @property
    def forwards(self) -> int:
        """Sequences that were put through the target."""
        return self._target.forwards if self._target else 0

    @property
    def choice(self) -> str | None:
        """How the target was read and why; None where it was not."""
        return f"{self._target.choice.mode}: {self._target.choice.reason}" if self._target else None

    def samples(self) -> dict[str, list[Manifest]]:
        """Sample id -> parts that together hold the wanted taps; made, in one go for those that lack the same taps."""
        found: dict[str, list[Manifest]] = {}
        lacking: dict[tuple[int, ...], list[Reference]] = {}
        for reference in self._references:
            fresh = bool(self._context.local.get("fresh"))
            chosen, covered = ([], set()) if fresh else self._store.existing(reference, self._taps)
            found[reference.sample_id] = chosen
            missing = tuple(sorted(set(self._taps) - covered))
            if missing:
                lacking.setdefault(missing, []).append(reference)
        total, done = len(self._references), len(self._references) - sum(map(len, lacking.values()))
        for taps, references in lacking.items():
            for reference, part in self._made(references, taps):
                found[reference.sample_id].append(part)
                done += 1
                self._context.progress(done, total, "prompts")
        return found

    def _made(self, references: Sequence[Reference], taps: Sequence[int]) -> Iterator[tuple[Reference, Manifest]]:
        if self._engine is not None:
            yield from self._imported(references, taps)
            return
        target = self._opened()
        sequences = [reference.token_ids for reference in references]
        for reference, captured in zip(references, target.extract(sequences, taps, batch=self._batch), strict=True):
            measured = self._measured(captured, reference)
            part = self._store.write(reference, captured, fidelity=measured, backend=self._backend, checks=self._checks)
            yield reference, part

    def _imported(self, references: Sequence[Reference], taps: Sequence[int]) -> Iterator[tuple[Reference, Manifest]]:
        """An engine's states, after one sample of them was computed here and agrees layer by layer."""
        source = EngineImport(self._engine or {}, self._opened(), taps=taps)
        compared = source.check(references, self.thresholds)
        self._context.milestone(f"{compared.name}: {compared.detail}")
        self._checks = (*(check for check in self._checks if check.name != compared.name), compared)
        for reference, (captured, judged) in zip(references, source.captured(references, taps), strict=True):
            measured = self._measured(captured, reference) if judged else not_delivered(reference)
            part = self._store.write(reference, captured, fidelity=measured, backend=source.backend(), checks=self._checks)
            yield reference, part

    def _measured(self, captured: CapturedStates, reference: Reference) -> SampleFidelity:
        return measure(
            captured.final,
            reference.token_ids,
            reference=reference,
            tables=self._tables,
            thresholds=self.thresholds,
            others=self._by_id,
        )

    def _opened(self) -> OpenTarget:
        if self._target is None:
            local = self._context.local
            self._target = open_target(
                self._directory,
                dtype=self._dtype,
                device=self._device,
                extraction=str(local.get("extraction", AUTO)),
                max_gpu_gib=local.get("max_gpu_memory_gib"),
            )
            self._context.milestone(f"the target is read {self._target.choice.mode}: {self._target.choice.reason}")
            self._checks = self._checked(self._target)
        return self._target

    def _checked(self, target: OpenTarget) -> tuple[LayerCheck, ...]:
        """The exact checks on the longest sample; before anything is kept, since what is kept passes for checked later."""
        longest = max(self._references, key=lambda reference: len(reference.token_ids))
        lines = self.thresholds
        checks = check_layers(
            target.backbone,
            longest.token_ids[:CHECK_TOKENS],
            self._taps,
            tables=self._tables,
            tolerance={torch.float32: lines.check_l2_float32, torch.bfloat16: lines.check_l2_bfloat16},
        )
        for check in checks:
            log.info("%s: %s (%s)", check.name, "holds" if check.passed else "FAILS", check.detail)
        failed = [check for check in checks if not check.passed]
        if failed:
            found = "; ".join(f"{check.name}: {check.detail}" for check in failed)
            raise NotEvaluable(
                f"The hidden states of this host would not be faithful: {found}.", f"Likely cause: {failed[0].meaning}"
            )
        return checks

    def judged(self, samples: dict[str, list[Manifest]]) -> FidelityReport:
        """The gate's verdict; where nothing explains a FAIL, other renderings of the prompts are tried."""
        measured = [
            assess(kept_fidelity(parts[0]), self._by_id[sample_id], self.thresholds) for sample_id, parts in samples.items()
        ]
        checks = self._checks or kept_checks(next(iter(samples.values()))[0])
        report = judge(measured, thresholds=self.thresholds, checks=checks, backend=self.backend_of(samples))
        if report.verdict != FAIL or report.causes[0].name not in (KERNELS, UNEXPLAINED):
            return report
        tried = self._with_templates(measured)
        return judge(tried, thresholds=self.thresholds, checks=checks, backend=self.backend_of(samples))

    def _with_templates(self, measured: Sequence[SampleFidelity]) -> list[SampleFidelity]:
        self._context.milestone("the gate fails and no misplacement explains it: trying other renderings of the prompts")
        tokenizer = load_tokenizer(self._directory)
        below = self.thresholds.fail_agree
        return try_templates(self._opened(), measured, self._by_id, tokenizer=tokenizer, tables=self._tables, below=below)

    def backend_of(self, samples: dict[str, list[Manifest]]) -> dict[str, Any]:
        """Kernels and versions that computed the states: one value, since it is part of the parts' names."""
        parts = next(iter(samples.values()))
        backend: dict[str, Any] = parts[0].facts["backend"]
        return backend
