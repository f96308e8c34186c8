"""What every number of result.json means, in the words that the report prints. One entry a name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_model.metrics import STREAK_WIDTHS, TREE_BUDGETS, Metric, ddtree_tau, streak_tau, tau_per_request, tau_pooled
from dflash_model.replay.records import NEAR_TIE_NATS

_TAILS = {
    "truncated": "Tail rule `truncated`: a step is cut at the stop token or the limit, as serving engines count.",
    "pypi": "Tail rule `pypi`: a step is cut at the stop token or the limit, and a block that would reach past the limit is "
    "drafted shorter, as PyPI dflash does.",
    "zlab": "Tail rule `zlab`: the last step counts in full, past the stop token or the limit, as z-lab's git loop counts.",
    "deepspec": "Tail rule `deepspec`: a stop token among the accepted drafts ends the request without a bonus token; at the limit "
    "the last step counts in full.",
}


def definitions(*, tail: str, level: float, equal_within: float, min_prompts: int) -> list[dict[str, Any]]:
    """[{name, definition, bonus, aggregation}] for the numbers of one result; the last two None where they do not apply."""
    entries: dict[str, Metric | str] = {
        "tau": tau_pooled([]),
        "per request": tau_per_request([]),
        **{f"top-{width} streak": streak_tau([], width, tail=tail) for width in STREAK_WIDTHS},
        **{f"DDTree-{budget}": ddtree_tau([], budget, tail=tail) for budget in TREE_BUDGETS},
        "tail": _TAILS[tail],
        "survival": "Slot i: share of verify steps that accept at least i drafted tokens. A slot past the end of the request "
        "was not observed and counts neither way (Kaplan-Meier), so with cut steps 1 + the sum of survival is a little "
        "above tau.",
        "conditional": "Slot i: of the steps that accepted every slot before i, the share that accepted slot i too.",
        "accuracy": "Slot i: how often its token was right at the visited anchors, whatever the slots before it did.",
        "interval": f"{100 * level:g}% interval by resampling prompts (bootstrap-t on the jackknife error; Student's t for means "
        f"over requests). Fewer than {min_prompts} prompts give none.",
        "vs reference": "Difference of pooled tau on the same prompts and tokens, candidate minus reference, with its paired "
        "interval.",
        "verdict": "Better or worse: Holm's test over all candidates leaves no doubt at that level. Equal: the whole interval "
        f"lies within {100 * equal_within:g}% of the reference's tau. Otherwise undecided, with the number of further prompts "
        "that would decide.",
        "slot effect": "Tokens per step that the reference would gain or lose with the candidate's conditional rate at that slot "
        "alone: where the two part.",
        "attribution": "The gap to the reference in parts that add up to it. Slots: the gap in 1 + the sum of survival; a loss at a slot "
        "costs what would have followed. Categories: the gap in pooled tau.",
        "near ties": f"Slots of all scored blocks whose two best candidates lie within {NEAR_TIE_NATS:g} nats of each other: "
        "another machine could have drafted the other one.",
    }
    return [_entry(name, meaning) for name, meaning in entries.items()]


def _entry(name: str, meaning: Metric | str) -> dict[str, Any]:
    if isinstance(meaning, Metric):
        return {"name": name, "definition": meaning.definition, "bonus": meaning.bonus, "aggregation": meaning.aggregation}
    return {"name": name, "definition": meaning, "bonus": None, "aggregation": None}


def definition_of(result: Mapping[str, Any], name: str) -> str:
    """The definition of `name` in a result; empty where it has none."""
    return next((str(entry["definition"]) for entry in result["definitions"] if entry["name"] == name), "")
