"""Exact checks, on one short prompt, of what logits cannot show: the right layers, whole, in place, and carried state.

An off-by-one layer costs a drafter a few percent and no error; the fidelity gate, which sees the last layer only, cannot
notice it. Each check compares two paths that must give the same numbers, and shows that a wrong one would not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from dflash_model.target.backbone import Backbone
from dflash_model.target.hidden_states import capturing, check_taps, run_forward
from dflash_model.target.tables import Tables

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest relative L2 difference of two paths that round differently; measured 2e-5 (float32) and 1.6e-2 at most (bfloat16)."""
CHECK_TOKENS = 160
"""Long enough for the chunked form of linear attention, which works on 64 tokens at a time, to hand its state on within one
pass, and in both halves of two; neither half ends where one of its chunks does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCheck:
    """One exact check."""

    name: str
    """What was compared."""

    passed: bool
    """Whether it holds."""

    detail: str
    """The figures, as a sentence."""

    meaning: str
    """What a failure would mean, as a sentence."""


def check_layers(
    backbone: Backbone,
    token_ids: Sequence[int],
    tap_indices: Sequence[int],
    *,
    tables: Tables,
    tolerance: Mapping[torch.dtype, float] = TOLERANCE,
) -> tuple[LayerCheck, ...]:
    """All checks on one prompt of at least two tokens; CHECK_TOKENS are enough.

    `tolerance`: largest relative L2 difference of two paths that round differently. Raises ConfigError for bad tap indices, StageError where a forward fails.
    """
    check_taps(tap_indices, backbone.num_layers)
    if len(token_ids) < 2:
        raise ValueError("the layer checks need at least two tokens")
    last = backbone.num_layers
    allowed = tolerance[backbone.dtype]
    with capturing(backbone, set(range(last + 1))) as captured:
        output = run_forward(backbone, token_ids, output_hidden_states=True)
    hooked = [captured[k][0] for k in range(last + 1)]
    reported = [states[0].to("cpu") for states in output.hidden_states or ()]
    return (
        _hooks_match_tuple(hooked, reported, backbone),
        _neighbours_differ(hooked, tap_indices),
        _tables_match_embedding(hooked[0], token_ids, tables, allowed),
        _tables_match_head(hooked[last], token_ids, backbone, tables, allowed),
        _chunks_match_whole(hooked[last], token_ids, backbone, allowed),
    )


def relative_l2(left: torch.Tensor, right: torch.Tensor) -> float:
    """|left - right| / |right| over all elements, in float64; infinite where only `right` is zero."""
    difference, size = float((left.double() - right.double()).norm()), float(right.double().norm())
    return difference / size if size else (0.0 if not difference else float("inf"))


def _hooks_match_tuple(hooked: list[torch.Tensor], reported: list[torch.Tensor], backbone: Backbone) -> LayerCheck:
    """hook[k] == hidden_states[k] exactly; the tuple's last entry is norm(hook), or raw where the model is set so."""
    name = "hooks equal output_hidden_states"
    meaning = "Hooks and the installed transformers disagree on which layer is which: taps would be off."
    if len(reported) != len(hooked):
        detail = f"the decoder gave {len(reported)} entries, not {len(hooked)}"
        return LayerCheck(name=name, passed=False, detail=detail, meaning=meaning)
    with torch.no_grad():
        normed = backbone.norm(hooked[-1][None].to(next(backbone.norm.parameters()).device))[0].to("cpu")
    wrong = [k for k in range(len(hooked) - 1) if not torch.equal(hooked[k], reported[k])]
    if not torch.equal(normed, reported[-1]) and not torch.equal(hooked[-1], reported[-1]):
        wrong.append(len(hooked) - 1)
    detail = f"differing indices: {wrong}" if wrong else f"all {len(hooked)} entries are equal"
    return LayerCheck(name=name, passed=not wrong, detail=detail, meaning=meaning)


def _neighbours_differ(hooked: list[torch.Tensor], tap_indices: Sequence[int]) -> LayerCheck:
    """Each wanted tap differs from the layer before and after it, and from the next wanted tap: none is stale or doubled."""
    pairs = {(k, near) for k in tap_indices for near in (k - 1, k + 1) if 0 <= near < len(hooked)}
    ordered = sorted(tap_indices)
    pairs |= set(pairwise(ordered))
    distances = {pair: relative_l2(hooked[pair[0]], hooked[pair[1]]) for pair in pairs}
    pair, smallest = min(distances.items(), key=lambda item: item[1])
    detail = f"the nearest two are taps {pair[0]} and {pair[1]}, relative distance {smallest:.2g}"
    meaning = "A tap holds another layer's rows: stale or doubled capture."
    return LayerCheck(name="neighbouring layers differ", passed=smallest > 0, detail=detail, meaning=meaning)


def _tables_match_embedding(embedded: torch.Tensor, token_ids: Sequence[int], tables: Tables, allowed: float) -> LayerCheck:
    rows = tables.embed[torch.tensor(list(token_ids), device=tables.embed.device)].to("cpu").float() * tables.embedding_scale
    meaning = "The tables are of another target, or the target scales its embedding in a way they do not carry."
    return _within("embedding table equals tap 0", relative_l2(rows, embedded), allowed, meaning=meaning)


def _tables_match_head(
    final: torch.Tensor, token_ids: Sequence[int], backbone: Backbone, tables: Tables, allowed: float
) -> LayerCheck:
    """norm and head of the tables against the model's own logits: the wrong norm form shows here."""
    with torch.no_grad():
        ids_1N = torch.tensor([list(token_ids)], device=backbone.device)  # noqa: N806 - shape suffix
        logits = backbone.model(input_ids=ids_1N, use_cache=False).logits[0].to("cpu")
    ours = tables.logits(final.to(tables.head.device)).to("cpu")
    meaning = "The tables are of another target, or its final norm is of the other form."
    return _within("tables give the model's logits", relative_l2(ours, logits), allowed, meaning=meaning)


def _chunks_match_whole(final: torch.Tensor, token_ids: Sequence[int], backbone: Backbone, allowed: float) -> LayerCheck:
    """The second half, read on top of the first half's cache, equals the same rows of one pass: state is carried, not dropped."""
    half = len(token_ids) // 2
    cache: Any = run_forward(backbone, token_ids[:half], use_cache=True).cache
    with capturing(backbone, {backbone.num_layers}) as captured:
        run_forward(backbone, token_ids[half:], use_cache=True, cache=cache)
    distance = relative_l2(captured[backbone.num_layers][0], final[half:])
    meaning = "A recurrent or attention state is lost between chunks: a kernel or fallback is wrong on this host."
    return _within("two chunks equal one pass", distance, allowed, meaning=meaning)


def _within(name: str, distance: float, tolerance: float, *, meaning: str) -> LayerCheck:
    detail = f"relative L2 difference {distance:.2g}, tolerance {tolerance:.2g}"
    return LayerCheck(name=name, passed=distance <= tolerance, detail=detail, meaning=meaning)
