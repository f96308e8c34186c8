"""result.json: what one evaluation found. No time, host or run id enters, so equal evaluations give equal bytes.

A number that was not measured is null, never 0. Computed numbers are rounded to six places, past which two machines'
sums may differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from typing import Any

from dflash_model.attribution import Part, attribution_sentence, category_parts, slot_parts
from dflash_model.comparison import PairedComparison, Rules, Tau, compare, tau_of
from dflash_model.definitions import definitions
from dflash_model.errors import NotEvaluable
from dflash_model.groups import LENGTH, Labels, group_differences, length_bucket
from dflash_model.metrics import (
    STREAK_WIDTHS,
    TREE_BUDGETS,
    RequestRow,
    by_category,
    ddtree_tau,
    request_rows,
    step_histogram,
    streak_tau,
)
from dflash_model.other_taus import other_taus
from dflash_model.pairing import check_same_tokens
from dflash_model.replay.records import SampleRecords
from dflash_model.replay.walk import TRUNCATED
from dflash_model.slots import SlotRates, slot_effects, slot_rates

SCHEMA_VERSION = 3
"""1 has no `warnings` of drafters; whoever reads one takes them as none. 1 and 2 have no `references`."""

CANDIDATE = "candidate"
REFERENCE = "reference"
_PLACES = 6
_SPEC_KEYS = ("family", "source_format", "block_size", "shift", "tap_indices", "mask_token_id", "num_layers", "layer_masks")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRecords:
    """One drafter and all that it said."""

    name: str
    """Shown everywhere; unique within a result."""

    role: str
    """CANDIDATE or REFERENCE; at most one drafter is the reference."""

    step: int | None
    """Training step, None where the checkpoint does not say."""

    digest: str
    """Of the checkpoint artifact."""

    spec: Mapping[str, Any]
    """DrafterSpec.to_json()."""

    records: Sequence[SampleRecords]
    """One a prompt, in any order."""

    warnings: Sequence[str] = ()
    """Sentences on what was assumed of this drafter, or looks wrong without being certain."""

    near_ties: int | None = None
    """Slots whose two best candidates nearly tie; None: count them in the records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """A drafter with what was computed before any comparison."""

    drafter: DrafterRecords
    samples: list[SampleRecords]
    rows: list[RequestRow]
    slots: list[SlotRates] = field(default_factory=list)


def result_schema() -> dict[str, Any]:
    """The JSON Schema of result.json at SCHEMA_VERSION."""
    schema: dict[str, Any] = json.loads(files("dflash_model").joinpath("result.schema.json").read_text(encoding="utf-8"))
    return schema


def build_result(
    *,
    drafters: Sequence[DrafterRecords],
    categories: Mapping[str, str],
    prompts_facts: Mapping[str, Any],
    target_facts: Mapping[str, Any],
    fidelity: Mapping[str, Any] | None,
    tail: str = TRUNCATED,
    rules: Rules | None = None,
    settings: Mapping[str, Any] | None = None,
    stride: int | None = None,
    target_logprobs: Mapping[str, Sequence[float]] | None = None,
    labels: Labels | None = None,
) -> dict[str, Any]:
    """The content of result.json. `stride` and `target_logprobs` as in `other_taus`; `labels`: further axes of groups.

    `categories` maps a prompt's id to its category (absent: none). The facts and `settings` are copied as they are, so they
    must be deterministic JSON. Raises NotEvaluable for a failed fidelity gate, InputError for drafters scored on different
    tokens, StageError for records that a walk needs and does not find, ValueError for names or roles that do not fit together.
    """
    if fidelity is not None and fidelity.get("verdict") == "FAIL":
        raise NotEvaluable(
            "The hidden states failed the fidelity gate, so no tau is given.", "See the fidelity facts of the states."
        )
    rules = rules or Rules()
    reference = _reference_name(drafters)
    measured = {drafter.name: _measure(drafter, categories, tail) for drafter in drafters}
    base = measured[reference if reference is not None else drafters[0].name]
    for name, one in measured.items():
        check_same_tokens(one.samples, base.samples, names=(name, base.drafter.name))
    compared = _compare(measured, reference, rules)
    axes = _axes(base, categories, labels or {})
    return {
        "schema_version": SCHEMA_VERSION,
        "headline": _headline(measured, compared, reference, rules),
        "definitions": definitions(tail=tail, level=rules.level, equal_within=rules.equal_within, min_prompts=rules.min_prompts),
        "target": dict(target_facts),
        "prompts": dict(prompts_facts),
        "tail": tail,
        "fidelity": dict(fidelity) if fidelity is not None else None,
        "settings": dict(settings or {}) | asdict(rules),
        "drafters": [
            _drafter(one, compared.get(name), base, axes, tail=tail, rules=rules)
            | {"other_taus": _other_taus(one, tail=tail, stride=stride, target_logprobs=target_logprobs)}
            for name, one in measured.items()
        ],
    }


def _reference_name(drafters: Sequence[DrafterRecords]) -> str | None:
    names = [drafter.name for drafter in drafters]
    if not drafters or len(set(names)) != len(names):
        raise ValueError(f"drafter names {names}, expected at least one and no name twice")
    references = [drafter.name for drafter in drafters if drafter.role == REFERENCE]
    if len(references) > 1 or any(drafter.role not in (CANDIDATE, REFERENCE) for drafter in drafters):
        raise ValueError(f"roles {[drafter.role for drafter in drafters]}, expected candidates and at most one reference")
    return references[0] if references else None


def _measure(drafter: DrafterRecords, categories: Mapping[str, str], tail: str) -> _Measured:
    samples = sorted(drafter.records, key=lambda records: records.sequence.sample_id)
    ids = [records.sequence.sample_id for records in samples]
    if len(set(ids)) != len(ids):
        raise ValueError(f"{drafter.name} has several records of one prompt")
    rows = request_rows(samples, tail=tail, categories=categories)
    return _Measured(drafter=drafter, samples=samples, rows=rows, slots=slot_rates(samples, tail=tail))


def _compare(measured: Mapping[str, _Measured], reference: str | None, rules: Rules) -> dict[str, PairedComparison]:
    if reference is None:
        return {}
    candidates = {name: one.rows for name, one in measured.items() if name != reference}
    return compare(candidates, measured[reference].rows, reference_name=reference, rules=rules)


def _headline(
    measured: Mapping[str, _Measured], compared: Mapping[str, PairedComparison], reference: str | None, rules: Rules
) -> str:
    """One sentence for a notification and the top of the report."""
    if len(compared) == 1:
        return next(iter(compared.values())).verdict.sentence
    if compared:
        words = [
            f"{name} {one.verdict.word}" + (f" ({one.difference.value:+.2f})" if one.difference else "")
            for name, one in compared.items()
        ]
        return f"{len(compared)} candidates against {reference}: {', '.join(words)}."
    taus = {name: tau_of(one.rows, rules=rules).pooled for name, one in measured.items()}
    words = [f"{name} has tau {tau:.2f}" if tau is not None else f"{name} has no verify step" for name, tau in taus.items()]
    return f"{', '.join(words)}; there is no reference to compare with."


def _axes(base: _Measured, categories: Mapping[str, str], labels: Labels) -> Labels:
    """What splits the prompts into groups: category, length of the completion, and what the prompt set says itself."""
    sequences = [records.sequence for records in base.samples]
    lengths = {one.sample_id: length_bucket(one.completion_length) for one in sequences}
    return {"category": categories, LENGTH: lengths, **labels}


def _drafter(
    one: _Measured, compared: PairedComparison | None, base: _Measured, axes: Labels, *, tail: str, rules: Rules
) -> dict[str, Any]:
    """One entry of "drafters"."""
    drafter, vocab_size = one.drafter, one.drafter.spec.get("vocab_size")
    tau = tau_of(one.rows, rules=rules)
    numbers = {
        "tau": asdict(tau),
        "streak": {str(width): streak_tau(one.samples, width, tail=tail).value for width in STREAK_WIDTHS},
        "ddtree": {
            str(budget): ddtree_tau(one.samples, budget, tail=tail, vocab_size=vocab_size).value for budget in TREE_BUDGETS
        },
        "slots": [_slot(slot) for slot in one.slots],
        "histogram": {str(tokens): steps for tokens, steps in step_histogram(one.rows).items()},
        "categories": {name: _category(tau_of(rows, rules=rules)) for name, rows in by_category(one.rows).items()},
        "vs_reference": _versus(compared, one, base, axes, rules),
    }
    spec = {key: drafter.spec[key] for key in _SPEC_KEYS}
    return {
        "name": drafter.name,
        "role": drafter.role,
        "step": drafter.step,
        "digest": drafter.digest,
        "spec": _rounded(spec | {"drafted_tokens": spec["block_size"] - 1 + spec["shift"]}),
        "warnings": list(drafter.warnings),
        "near_ties": drafter.near_ties if drafter.near_ties is not None else _near_ties(one.samples),
        **_rounded(numbers),
        "requests": [
            {"sample_id": row.sample_id, "category": row.category, "steps": row.steps, "tokens": row.tokens} for row in one.rows
        ],
    }


def _other_taus(one: _Measured, **options: Any) -> list[dict[str, Any]]:
    """[{name, value, definition, bonus, aggregation}]"""
    found = other_taus(one.samples, one.rows, **options)
    return [{"name": name} | _rounded(asdict(metric)) for name, metric in found.items()]


def _near_ties(samples: Sequence[SampleRecords]) -> int | None:
    """Sum over the samples that can tell; None where none can."""
    counts = [records.near_ties for records in samples if records.near_ties is not None]
    return sum(counts) if counts else None


def _slot(rates: SlotRates) -> dict[str, Any]:
    return asdict(rates) | {"conditional": rates.conditional, "accuracy": rates.accuracy}


def _category(tau: Tau) -> dict[str, Any]:
    return {
        "tau": tau.pooled,
        "interval": tau.interval,
        "prompts": tau.requests - tau.requests_without_steps,
        "steps": tau.steps,
    }


def _versus(
    compared: PairedComparison | None, one: _Measured, base: _Measured, axes: Labels, rules: Rules
) -> dict[str, Any] | None:
    """ "vs_reference" of a candidate; None for the reference or without one."""
    if compared is None:
        return None
    difference, verdict = compared.difference, compared.verdict
    spread = difference.spread if difference is not None else None
    effects = slot_effects(one.slots, base.slots)
    direction = difference.value if difference is not None else 0.0
    along = [(abs(effect), -slot) for slot, effect in enumerate(effects, start=1) if effect and effect * direction > 0]
    return {
        "reference": base.drafter.name,
        "prompts": difference.prompts if difference else 0,
        "difference": difference.value if difference else None,
        "interval": spread.interval if spread else None,
        "relative_difference": difference.relative if difference else None,
        "per_request_difference": difference.per_request if difference else None,
        "per_request_interval": spread.per_request_interval if spread else None,
        "sign_disagreement": difference.sign_disagreement if difference else None,
        "equal_within": difference.equal_within if difference else None,
        "p_value": spread.p_value if spread else None,
        "candidates": spread.candidates if spread else None,
        "verdict": verdict.word,
        "further_prompts": verdict.further_prompts,
        "sentence": verdict.sentence,
        "slot_effects": effects,
        "parts_at_slot": -max(along)[1] if along else None,
        "attribution": _attribution(one, base),
        "groups": [asdict(group) for group in group_differences(one.rows, base.rows, axes, rules=rules)],
    }


def _attribution(one: _Measured, base: _Measured) -> dict[str, Any]:
    slots, categories = slot_parts(one.slots, base.slots), category_parts(one.rows, base.rows)

    def listed(parts: Sequence[Part]) -> list[dict[str, Any]]:
        return [asdict(part) for part in parts]

    return {"slots": listed(slots), "categories": listed(categories), "sentence": attribution_sentence(slots, categories)}


def _rounded(value: Any) -> Any:
    """Floats to six places (no negative zero), tuples to lists, whatever the depth."""
    if isinstance(value, float):
        return round(value, _PLACES) + 0.0
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value
