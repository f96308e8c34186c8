"""The same records under the definitions that others print, so that their numbers can be laid beside ours.

Each is a Metric: value None where the records cannot say, with its definition, whether the bonus token counts, and how it
is aggregated. Nothing here is an estimate but the bounds for rejection sampling, which are bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dflash_model.errors import StageError
from dflash_model.metrics import PER_REQUEST, POOLED, Metric, RequestRow, complete_walk, request_rows, tau_per_request, tau_pooled
from dflash_model.replay.records import SampleRecords
from dflash_model.replay.walk import PYPI, TAILS, TRUNCATED, Matcher, chain_matched, counts_in_full

OVER_ANCHORS = "pooled over anchors"
_WHOSE = {
    TRUNCATED: "serving engines: the last step is cut at the stop token or the limit",
    PYPI: "PyPI dflash: the last step is cut, and blocks before the limit are drafted shorter",
    "zlab": "z-lab's git loop: the last step counts in full",
    "deepspec": "DeepSpec: an accepted stop token ends the request without a bonus token, at the limit the step counts in full",
}
Float64 = npt.NDArray[np.float64]


def other_taus(
    samples: Sequence[SampleRecords],
    rows: Sequence[RequestRow],
    *,
    tail: str,
    stride: int | None = None,
    target_logprobs: Mapping[str, Sequence[float]] | None = None,
) -> dict[str, Metric]:
    """Name -> metric, in the order in which a report shows them.

    `rows` are the chain's under `tail`, the rule of the replay. `stride`: of the replay's extra anchors, None for none.
    `target_logprobs`: sample id -> the target's log-probability of each completion token, where its maker told them.
    """
    found: dict[str, Metric] = {}
    for rule in TAILS:
        of_rule = rows_under(samples, rule, replayed=tail)
        for name, metric in (("tau", tau_pooled(of_rule or [])), ("tau per request", tau_per_request(of_rule or []))):
            found[f"{name}, tail {rule}"] = _as(metric, f"{metric.definition} As {_WHOSE[rule]}.")
    found |= completion_per_verify(samples, rows)
    found["uniform-anchor tau"] = uniform_tau(samples, stride, tail=tail)
    least, most = rejection_bounds(samples, target_logprobs or {}, tail=tail)
    return found | {"tau under rejection sampling, at least": least, "tau under rejection sampling, at most": most}


def rows_under(samples: Sequence[SampleRecords], rule: str, *, replayed: str) -> list[RequestRow] | None:
    """The chain's rows under another tail rule than the replay's; None where its blocks or tokens were not computed.

    Shortened blocks are other blocks, so PyPI's rule and the others never share a replay. A step that counts in full needs
    to know as many tokens past the end as a block drafts.
    """
    if (rule == PYPI) != (replayed == PYPI):
        return None
    for records in samples:
        drafted = records.true_ids.shape[1]
        if counts_in_full(records.sequence, rule) and records.sequence.overshoot_length < drafted:
            return None
    try:
        return request_rows(samples, tail=rule)
    except StageError:
        return None


def completion_per_verify(samples: Sequence[SampleRecords], rows: Sequence[RequestRow]) -> dict[str, Metric]:
    """SGLang's spec_accept_length: completion tokens, the one from prefill among them, over verify steps."""
    lengths = {records.sequence.sample_id: records.sequence.completion_length for records in samples}
    counted = [(lengths[row.sample_id], row.steps) for row in rows if row.steps]
    steps = sum(taken for _, taken in counted)
    ratios = [tokens / taken for tokens, taken in counted]
    text = "Completion tokens, the token from prefill among them, over verify steps (completion_tokens / spec_verify_ct)"
    return {
        "completion tokens per verify": Metric(
            value=sum(tokens for tokens, _ in counted) / steps if steps else None,
            definition=f"{text}, summed over all requests with a step first, as SpecForge's bench does with SGLang's counts.",
            bonus=True,
            aggregation=POOLED,
        ),
        "completion tokens per verify, per request": Metric(
            value=sum(ratios) / len(ratios) if ratios else None,
            definition=f"{text} of each request, then the mean: the mean of SGLang's spec_accept_length.",
            bonus=True,
            aggregation=PER_REQUEST,
        ),
    }


def uniform_tau(
    samples: Iterable[SampleRecords], stride: int | None, *, tail: str = TRUNCATED, matcher: Matcher = chain_matched
) -> Metric:
    """Mean of a step's tokens over every stride-th position of the completions, visited or not; None without such a replay.

    Raises StageError where the records lack one of those anchors.
    """
    steps = []
    for records in samples if stride is not None else ():
        sequence = records.sequence
        for anchor in range(sequence.prompt_length, sequence.end - 1, stride or 1):
            row = records.row_of(anchor)
            if row is None:
                raise StageError(
                    f"The records of {sequence.sample_id} have no anchor {anchor} of stride {stride}.", "Replay with that stride."
                )
            step = matcher(records, row) + 1
            steps.append(step if counts_in_full(sequence, tail) else min(step, sequence.end - 1 - anchor))
    every = "every" if stride in (None, 1) else f"every {stride}th"
    return Metric(
        value=sum(steps) / len(steps) if steps else None,
        definition=f"Tokens of a step that starts at {every} position of a completion, whether generation would start one there or "
        "not: what training metrics estimate. No engine measures it.",
        bonus=True,
        aggregation=OVER_ANCHORS,
    )


def rejection_bounds(
    samples: Iterable[SampleRecords], target_logprobs: Mapping[str, Sequence[float]], *, tail: str = TRUNCATED
) -> tuple[Metric, Metric]:
    """Bounds of tau if drafts were sampled and verified by rejection at temperature 1, at the chain's anchors on these texts.

    A slot is accepted with probability sum over tokens of min(p, q) (1 minus the total variation distance). Of target p and
    drafter q the records know the true token's p* and q*, so it lies between min(p*, q*) and min(p*, q*) + min(1 - p*, 1 - q*).
    A block's expected step is 1 + the sum over slots of the product of the slots up to it, no further than the request wants. None unless every sample with a step has log-probabilities.
    """
    least: list[float] = []
    most: list[float] = []
    measurable = True
    for records in samples:
        sequence, known = records.sequence, target_logprobs.get(records.sequence.sample_id)
        anchors = complete_walk(records, chain_matched, tail=tail).anchors
        if anchors and (known is None or len(known) != sequence.completion_length or records.conditional):
            measurable = False
            break
        for anchor in anchors:
            row = records.row_of(anchor)
            assert row is not None
            # The last wanted token comes as a bonus at the latest, so the slot that drafts it decides nothing.
            slots = max(0, min(records.drafted_slots(row), sequence.end - 2 - anchor))
            first = anchor + 1 - sequence.prompt_length
            p = np.exp(np.asarray((known or ())[first : first + slots], dtype=np.float64))
            q = np.exp(records.true_logprob[row, :slots].astype(np.float64))
            least.append(_expected_step(np.minimum(p, q)))
            most.append(_expected_step(np.minimum(p, q) + np.minimum(1 - p, 1 - q)))
    text = (
        "if drafts were sampled and verified by rejection at temperature 1 at the same anchors. Only the true token's probabilities "
        "are known, which leave this bound of each slot's acceptance (1 - total variation distance)."
    )
    values = [sum(found) / len(found) if measurable and found else None for found in (least, most)]
    lower, upper = (
        Metric(value=value, definition=f"Tokens per step, at {word}, {text}", bonus=True, aggregation=POOLED)
        for value, word in zip(values, ("least", "most"), strict=True)
    )
    return lower, upper


def _expected_step(accepted: Float64) -> float:
    """1 + sum of the products of the slots' acceptance probabilities."""
    return 1.0 + float(np.cumprod(accepted).sum())


def _as(metric: Metric, definition: str) -> Metric:
    return Metric(value=metric.value, definition=definition, bonus=metric.bonus, aggregation=metric.aggregation)
