"""Description: what a checkpoint is, field by field: the value, whether it was read, inferred or given, and where it stands.

The value is JSON (version 1); the terminal shows the same. A field that nothing states and that changes nothing is listed
apart, so that what matters is not buried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from dflash_model.checkpoint.extract import ExtractPlan
from dflash_model.drafter.bare import REFERENCE
from dflash_model.drafter.building import Reading
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.drafter.support import unsupported

DESCRIPTION_VERSION = 1
READ, INFERRED, GIVEN = "read", "inferred", "given"
_FORMS = {
    "zlab": "z-lab's form",
    "speculators": "speculators' form",
    "deepspec": "DeepSpec's form",
    "bare": "a training file without a config",
}
_FAMILIES = {"dflash": "DFlash", "dflash2": "DFlash2"}
_ABSENT = ("not stated", "is not there")


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldRow:
    """One field of the spec."""

    name: str
    """As in DrafterSpec."""

    value: Any
    """As in its JSON."""

    words: str
    """The value for people."""

    origin: str
    """READ (from config, saved args or tensors), INFERRED (nobody states it) or GIVEN (by an option)."""

    place: str
    """Where it stands, or why it is inferred."""

    neutral: bool
    """Whether nothing states it and it changes nothing."""


def field_rows(spec: DrafterSpec) -> list[FieldRow]:
    """One row a field, in DrafterSpec's order."""
    data = spec.to_json()
    rows = []
    for one in fields(spec):
        if one.name == "provenance":
            continue
        place = spec.provenance.get(one.name, "not stated")
        absent = place.endswith(_ABSENT)
        rows.append(
            FieldRow(
                name=one.name,
                value=data[one.name],
                words=_words(one.name, getattr(spec, one.name)),
                origin=_origin(place),
                place=place,
                neutral=absent and getattr(spec, one.name) in (None, False, 1.0),
            )
        )
    return rows


def headline(spec: DrafterSpec, plan: ExtractPlan) -> str:
    """One sentence: family, form, size."""
    weights = sum(_count(tensor.shape) for tensor in plan.tensors)
    dtypes = Counter(tensor.dtype for tensor in plan.tensors)
    kinds = ", ".join(name for name, _ in dtypes.most_common())
    return (
        f"{_FAMILIES[spec.family]} drafter in {_FORMS[spec.source_format]}: {spec.num_layers} layers, {spec.num_taps} taps, "
        f"block of {spec.block_size} rows, {spec.drafted_tokens} drafted tokens, {_millions(weights)} numbers as {kinds}."
    )


def describe(reading: Reading, plan: ExtractPlan, *, path: str, host: str, step: int | None) -> dict[str, Any]:
    """The whole description as a JSON value."""
    spec = reading.spec
    return {
        "description_version": DESCRIPTION_VERSION,
        "path": path,
        "host": host,
        "format": plan.table.format,
        "headline": headline(spec, plan),
        "step": step,
        "tensors": len(plan.tensors),
        "weights_bytes": sum(tensor.size_bytes for tensor in plan.tensors),
        "checkpoint_bytes": plan.table.size_bytes,
        "state_key": plan.state.key_path,
        "prefixes": list(plan.state.prefixes),
        "dropped": plan.state.dropped,
        "drafted_tokens": spec.drafted_tokens,
        "fields": [{"name": row.name, "value": row.value, "origin": row.origin, "place": row.place} for row in field_rows(spec)],
        "unread_keys": spec.provenance["unread"].split(", ") if "unread" in spec.provenance else [],
        "unsupported": unsupported(spec),
        "warnings": list(reading.warnings),
        "spec": spec.to_json(),
    }


def _origin(place: str) -> str:
    if place.startswith(("--", REFERENCE)):
        return GIVEN
    inferred = place.startswith(("not stated", "shapes of")) or "; whole-head rotation" in place
    return INFERRED if inferred else READ


def _words(name: str, value: Any) -> str:
    match value:
        case Rope():
            return _rope_words(value)
        case tuple() if name == "layer_masks":
            return "; ".join(f"{count} x {words}" for words, count in Counter(map(_mask_words, value)).items())
        case tuple():
            return f"{', '.join(map(str, value))} ({_tap_words(value)})"
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
    return str(value)


def _tap_words(taps: Sequence[int]) -> str:
    layers = [str(index - 1) for index in taps if index]
    parts = (["the embedding's output"] if taps[0] == 0 else []) + ([f"outputs of layers {', '.join(layers)}"] if layers else [])
    return " and ".join(parts)


def _mask_words(mask: MaskPolicy) -> str:
    if mask.window is None:
        return f"whole context, {mask.in_block} in the block"
    origin = "from the anchor" if mask.window_origin == "anchor" else "of each query"
    return f"window of {mask.window} {origin}, {mask.in_block} in the block"


def _rope_words(rope: Rope) -> str:
    pairs = "interleaved pairs" if rope.interleaved else "half-split pairs"
    scaling = "".join(f", {name} {value:g}" for name, value in rope.scaling)
    sections = f", sections {list(rope.sections)}" if rope.sections else ""
    return f"base {rope.theta:g}, {rope.dims} dimensions in {pairs}, {rope.type}{scaling}{sections}"


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _millions(number: int) -> str:
    return f"{number / 1e9:.2f} G" if number >= 1e9 else f"{number / 1e6:.1f} M" if number >= 1e6 else f"{number / 1e3:.1f} k"
