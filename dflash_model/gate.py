"""The gate: rules that turn an evaluation into a red night. Pure functions of results.

A rule speaks only where a verdict is sure: "worse than" needs the verdict worse and a difference beyond the rule's margin.
What could not be judged (no reference, too few prompts) is said as not applied, never taken for passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_model.comparison import PairedComparison, Rules, compare
from dflash_model.evaluations import request_totals
from dflash_model.verdict import NO_VERDICT, WORSE


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRules:
    """What makes a night red; None or False: that rule is off."""

    worse_than_reference: float | None = None
    """Share of the reference's tau: red where a candidate is worse and loses more than that."""

    worse_than_best: float | None = None
    """Likewise against the best earlier checkpoint of the same training run, on the same ground."""

    min_tau: float | None = None
    """Red where a candidate's pooled tau lies below."""

    fidelity_pass: bool = False
    """Red where the fidelity gate says anything but PASS."""

    @property
    def any(self) -> bool:
        """Whether any rule is on."""
        return self != GateRules()


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """The best earlier checkpoint that a candidate can be held against."""

    run_id: str
    """Evaluation that holds it."""

    name: str
    """Its name there."""

    result: Mapping[str, Any]
    """That evaluation's result.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateOutcome:
    """What the gate found."""

    regressed: tuple[str, ...]
    """A sentence per broken rule; empty: green."""

    not_applied: tuple[str, ...]
    """A sentence per rule that could not be judged."""

    def to_json(self) -> dict[str, list[str]]:
        """{"regressed", "not_applied"}: kept in run.json."""
        return {"regressed": list(self.regressed), "not_applied": list(self.not_applied)}


def judge_gate(result: Mapping[str, Any], rules: GateRules, best: Mapping[str, Best | None]) -> GateOutcome:
    """Hold each candidate of `result` against the rules. `best`: candidate -> what `worse_than_best` compares it with."""
    regressed: list[str] = []
    open_rules: list[str] = []
    fidelity = result["fidelity"]
    if rules.fidelity_pass and (fidelity is None or fidelity["verdict"] != "PASS"):
        said = "there was no fidelity gate" if fidelity is None else f"the fidelity gate says {fidelity['verdict']}"
        regressed.append(f"Fidelity: {said}.")
    for entry in result["drafters"]:
        if entry["role"] == "candidate":
            for found, reason in (_floor(entry, rules), _reference(entry, rules), _best(result, entry, rules, best)):
                (regressed if found else open_rules).extend([reason] if reason else [])
    return GateOutcome(regressed=tuple(regressed), not_applied=tuple(open_rules))


_QUIET = (False, "")
"""Not red, and nothing to say."""


def _floor(entry: Mapping[str, Any], rules: GateRules) -> tuple[bool, str]:
    tau = entry["tau"]["pooled"]
    if rules.min_tau is None or (tau is not None and tau >= rules.min_tau):
        return _QUIET
    if tau is None:
        return False, f"{entry['name']} has no verify step to hold against the floor {rules.min_tau:g}."
    return True, f"{entry['name']} has tau {tau:.2f}, below the floor {rules.min_tau:g}."


def _reference(entry: Mapping[str, Any], rules: GateRules) -> tuple[bool, str]:
    margin, against = rules.worse_than_reference, entry["vs_reference"]
    if margin is None:
        return _QUIET
    if against is None:
        return False, f"{entry['name']} has no reference to be held against."
    return _worse(entry["name"], against["reference"], against["verdict"], against["relative_difference"], margin)


def _best(
    result: Mapping[str, Any], entry: Mapping[str, Any], rules: GateRules, best: Mapping[str, Best | None]
) -> tuple[bool, str]:
    margin = rules.worse_than_best
    if margin is None:
        return _QUIET
    held = best.get(entry["name"])
    if held is None:
        return False, f"There is no earlier checkpoint of {entry['name']}'s training run to hold it against."
    compared = compare_results(result, entry["name"], held.result, held.name)
    relative = compared.difference.relative if compared.difference is not None else None
    return _worse(entry["name"], f"{held.name} of {held.run_id}", compared.verdict.word, relative, margin)


def _worse(name: str, other: str, verdict: str, relative: float | None, margin: float) -> tuple[bool, str]:
    if verdict == NO_VERDICT or relative is None:
        return False, f"{name} has too few prompts for a verdict against {other}."
    if verdict != WORSE or relative >= -margin:
        return _QUIET
    return True, f"{name} is worse than {other} by {-100 * relative:.1f}%, more than {100 * margin:g}% is allowed."


def compare_results(ours: Mapping[str, Any], name: str, theirs: Mapping[str, Any], other: str) -> PairedComparison:
    """Drafter `name` of one result.json minus `other` of another, paired by prompt over those that both have.

    The margin of "equal" and the least number of prompts are those of `ours`. Raises InputError for names that are not there.
    """
    _, left = request_totals(ours, name)
    _, right = request_totals(theirs, other)
    shared = sorted({row.sample_id for row in left} & {row.sample_id for row in right})
    pairs: list[Sequence[Any]] = [
        [by_id[sample] for sample in shared] for by_id in ({r.sample_id: r for r in s} for s in (left, right))
    ]
    label, against = (name, other) if name != other else (f"{name} (first)", f"{other} (second)")
    settings = ours["settings"]
    rules = Rules(level=settings["level"], equal_within=settings["equal_within"], min_prompts=settings["min_prompts"])
    return compare({label: pairs[0]}, pairs[1], reference_name=against, rules=rules)[label]
