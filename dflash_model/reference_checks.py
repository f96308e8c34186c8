"""What must be said of the references beside every tau: which completions run in circles and what tau is without them,
which prompts are missing, and how the serving engine's own counters compare with the replay of the same requests.

Works on the requests of result.json ({sample_id, steps, tokens} of each drafter), so it needs no records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dflash_model.loops import RULE, looping_tokens
from dflash_model.served import tokens_per_step
from dflash_model.target.references import TEXT, Reference

SERVED_RULE = (
    "Tokens after the first over verify steps, as the engine counted them with its own drafter, pooled; beside it tau of each "
    "drafter here on the same requests. The engine's drafter and a replayed one agree only if they are the same."
)


def reference_section(
    references: Sequence[Reference], facts: Mapping[str, Any], drafters: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The entry "references" of result.json. `facts`: those of the references' artifact; `drafters`: result.json's."""
    looping = {one.sample_id: looping_tokens(one.completion_ids) for one in references}
    looping = {sample_id: length for sample_id, length in looping.items() if length}
    straight = {one.sample_id for one in references} - looping.keys()
    section: dict[str, Any] = {
        "from": facts["from"],
        "token_source": facts["token_source"],
        "refused": dict(facts["refused"]),
        "looping": {
            "rule": RULE,
            "requests": looping,
            "tau_without": {drafter["name"]: _tau(drafter, straight) for drafter in drafters},
        },
        "served": _served(references, drafters),
    }
    return section | {"notes": _notes(section, count=len(references))}


def _served(references: Sequence[Reference], drafters: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The engine's counters against the replays; None where it gave none."""
    counted = {one.sample_id: one.served for one in references if one.served is not None}
    pooled = tokens_per_step(counted.values())
    if pooled is None:
        return None
    return {
        "rule": SERVED_RULE,
        "requests": len(counted),
        "verify_steps": sum(one.verify_steps for one in counted.values()),
        "tokens_per_step": round(pooled, 6),
        "replayed": {drafter["name"]: _tau(drafter, counted.keys()) for drafter in drafters},
    }


def _tau(drafter: Mapping[str, Any], wanted: Collection[str]) -> float | None:
    """Pooled over the requests of `wanted`; None without a step."""
    rows = [request for request in drafter["requests"] if request["sample_id"] in wanted]
    steps = sum(request["steps"] for request in rows)
    return round(sum(request["tokens"] for request in rows) / steps, 6) if steps else None


def _notes(section: Mapping[str, Any], *, count: int) -> list[str]:
    """Sentences for the terminal and the top of the report."""
    notes = []
    looping, served, refused = section["looping"], section["served"], section["refused"]
    if looping["requests"]:
        taus = _listed(looping["tau_without"])
        notes.append(
            f"{len(looping['requests'])} of {count} completions run in circles, which flatters tau; without them: {taus}."
        )
    if refused:
        notes.append(
            f"{len(refused)} of {count + len(refused)} prompts are left out: the engine's answers cannot be told exactly."
        )
    if section["token_source"] == TEXT:
        notes.append("The engine told text only: tokens are that text's own tokenisation.")
    if served:
        replayed = _listed(served["replayed"])
        notes.append(
            f"The engine's own drafter earned {served['tokens_per_step']:.2f} tokens a step on {served['requests']} requests; "
            f"replayed on the same: {replayed}."
        )
    return notes


def _listed(taus: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {tau:.2f}" if tau is not None else f"{name} has no step" for name, tau in taus.items())
