"""The gate's verdict over all samples: PASS, WARN or FAIL, why, and what most likely went wrong.

FAIL means "not evaluable": a tau from such states would be read as a bad drafter. WARN is printed beside the score.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dflash_model.errors import NotEvaluable
from dflash_model.target import fidelity, misplacements
from dflash_model.target.fidelity import SampleFidelity, Thresholds
from dflash_model.target.layer_checks import LayerCheck

PASS = "PASS"
WARN = "WARN"
FAIL = "FAIL"
UNEXPLAINED = "unexplained"
KERNELS = "linear_attention_kernels"

SENTENCES = {
    misplacements.SHIFTED_LATER: "Each row is one place late: row i holds the state after token i - 1.",
    misplacements.SHIFTED_EARLIER: "Each row is one place early: row i holds the state after token i + 1.",
    misplacements.NORM_TWICE: (
        "The rows passed the final norm already (the last entry of output_hidden_states is like that): it was applied twice."
    ),
    misplacements.NORM_OMITTED: "The rows are said to have passed the final norm, but they are raw: the norm was omitted.",
    misplacements.TEMPLATE: "The completions were made from another rendering of the prompt (chat template, thinking mode, BOS).",
    misplacements.COMPUTED_AGAIN: (
        "Computed here once more, the same tokens agree: the rows are of other tokens (an engine that mixed up requests, or "
        "lost a state once)."
    ),
    misplacements.NORM_FORM: "The final norm was applied in the other form (w for 1 + w, or the reverse).",
    fidelity.TOKENS: "The states are of an older reference or another prompt set.",
    fidelity.ROWS: "Rows were cut or added: prefix caching, a truncating server, or another sample's states.",
    fidelity.NON_FINITE: "An overflow (float16 anywhere in the path) or a kernel that is broken on this host.",
    fidelity.ZERO_ROWS: "Nothing was captured: a hook or connector that did not fire, or a buffer that was never filled.",
    UNEXPLAINED: (
        "No misplacement explains it, so the computation itself differs: other weights than the reference's, a kernel or "
        "fallback that is wrong on this host, padding without a mask, or packed sequences."
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """One explanation of a FAIL that was tried."""

    name: str
    """`rows_shifted_later`, `norm_applied_twice`, ...; `unexplained` where nothing tried does."""

    sentence: str
    """What it would mean."""

    agree: float | None
    """Share of the suspect samples' tokens that agree under it; None for `unexplained` and swapped samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityReport:
    """What the gate found."""

    verdict: str
    """PASS, WARN or FAIL."""

    reasons: tuple[str, ...]
    """Sentences that lowered the verdict, the gravest first; () for PASS."""

    causes: tuple[Cause, ...]
    """For a FAIL: explanations, the best first."""

    n: int
    """Completion tokens compared, pooled."""

    agree: float | None
    """Pooled share of agreeing tokens."""

    hard_rate: float | None
    """Pooled share of hard disagreements."""

    max_gap_nats: float | None
    """Largest gap of any token."""

    mean_nll_nats: float | None
    """Mean negative log-probability of the reference's tokens."""

    first_hard: tuple[str, int] | None
    """(sample id, position) of the first hard disagreement, in sample order."""

    delta_median_nats: float | None
    """Median of |our log-probability - the recorded one|."""

    delta_p99_nats: float | None
    """99th percentile (nearest rank) of the same."""

    samples: tuple[SampleFidelity, ...]
    """Per sample."""

    checks: tuple[LayerCheck, ...]
    """Exact checks of what logits cannot show."""

    thresholds: Thresholds
    """The lines drawn."""

    def to_json(self) -> dict[str, Any]:
        """A JSON value; samples without their per-token lists."""
        data = asdict(self)
        for sample in data["samples"]:
            for name in ("deltas_nats", "gaps_nats", "logprobs"):
                del sample[name]
        return data


def judge(
    samples: Sequence[SampleFidelity],
    *,
    thresholds: Thresholds,
    checks: Sequence[LayerCheck] = (),
    backend: Mapping[str, Any] | None = None,
) -> FidelityReport:
    """Pool the samples and give the verdict. `backend` is `kernels.describe_backend`'s value for the states' maker."""
    n = sum(sample.n for sample in samples)
    agree = sum(sample.agreeing for sample in samples) / n if n else None
    hard_rate = sum(sample.hard for sample in samples) / n if n else None
    deltas = sorted(value for sample in samples for value in sample.deltas_nats or ())
    delta_median = median(deltas) if deltas else None
    delta_p99 = deltas[math.ceil(0.99 * len(deltas)) - 1] if deltas else None
    failures = [
        *(fault for sample in samples for fault in sample.faults.values()),
        *(f"{check.name}: {check.detail}" for check in checks if not check.passed),
        *_pooled_failures(n, agree, hard_rate, thresholds),
        *_sample_failures(samples, thresholds),
        *_delta_failures(delta_median, thresholds),
    ]
    warnings = [
        *_unseen_warnings(samples),
        *_pooled_warnings(n, agree, hard_rate, thresholds),
        *_delta_warnings(delta_median, delta_p99, thresholds),
        *_backend_warnings(backend),
    ]
    gaps = [sample.max_gap_nats for sample in samples if sample.max_gap_nats is not None]
    return FidelityReport(
        verdict=FAIL if failures else WARN if warnings else PASS,
        reasons=(*failures, *warnings),
        causes=_causes(samples, checks, backend) if failures else (),
        n=n,
        agree=agree,
        hard_rate=hard_rate,
        max_gap_nats=max(gaps) if gaps else None,
        mean_nll_nats=sum(sample.nll_sum_nats for sample in samples) / n if n else None,
        first_hard=next(((s.sample_id, s.first_hard_position) for s in samples if s.first_hard_position is not None), None),
        delta_median_nats=delta_median,
        delta_p99_nats=delta_p99,
        samples=tuple(samples),
        checks=tuple(checks),
        thresholds=thresholds,
    )


def require_faithful(report: FidelityReport) -> None:
    """Raises NotEvaluable, with the first reason and the best cause, where the verdict is FAIL."""
    if report.verdict == FAIL:
        cause = report.causes[0].sentence if report.causes else SENTENCES[UNEXPLAINED]
        more = f" Further reasons in the log: {len(report.reasons) - 1}." if len(report.reasons) > 1 else ""
        raise NotEvaluable(f"The hidden states are not faithful: {report.reasons[0]}{more}", f"Likely cause: {cause}")


def _pooled_failures(n: int, agree: float | None, hard_rate: float | None, thresholds: Thresholds) -> Iterable[str]:
    if agree is None or hard_rate is None:
        yield "There is not one completion token to compare."
        return
    if agree < thresholds.fail_agree:
        yield f"Only {agree:.1%} of {n} tokens agree with the reference (at least {thresholds.fail_agree:.0%} is needed)."
    if hard_rate > thresholds.fail_hard_rate:
        limit = f"at most {thresholds.fail_hard_rate:.0%} may"
        yield f"{hard_rate:.1%} of {n} tokens disagree by more than {thresholds.hard_gap_nats} nat ({limit})."


def _sample_failures(samples: Sequence[SampleFidelity], thresholds: Thresholds) -> Iterable[str]:
    for sample in samples:
        if sample.agree is None or sample.hard_rate is None or sample.n < thresholds.sample_tokens:
            continue
        if sample.agree < thresholds.sample_agree and sample.hard_rate > thresholds.fail_hard_rate:
            yield f"Sample {sample.sample_id} agrees on only {sample.agree:.1%} of its {sample.n} tokens."


def _unseen_warnings(samples: Sequence[SampleFidelity]) -> Iterable[str]:
    unseen = sum(not sample.n and not sample.faults for sample in samples)
    if unseen:
        yield f"The gate could not look at {unseen} of {len(samples)} samples: the engine did not deliver the last layer."


def _pooled_warnings(n: int, agree: float | None, hard_rate: float | None, thresholds: Thresholds) -> Iterable[str]:
    if agree is None or hard_rate is None:
        return
    if thresholds.fail_agree <= agree < thresholds.pass_agree:
        yield f"{agree:.1%} of {n} tokens agree with the reference ({thresholds.pass_agree:.0%} or more is usual)."
    if thresholds.pass_hard_rate < hard_rate <= thresholds.fail_hard_rate:
        yield f"{hard_rate:.2%} of {n} tokens disagree by more than {thresholds.hard_gap_nats} nat."
    if n < thresholds.few_tokens:
        yield f"Only {n} completion tokens were compared; below {thresholds.few_tokens} a handful decides the verdict."


def _delta_failures(delta_median: float | None, thresholds: Thresholds) -> Iterable[str]:
    if delta_median is not None and delta_median > thresholds.fail_delta_median_nats:
        yield f"Recorded log-probabilities differ from ours by {delta_median:.3f} nat in the median: another distribution."


def _delta_warnings(delta_median: float | None, delta_p99: float | None, thresholds: Thresholds) -> Iterable[str]:
    if delta_median is not None and thresholds.delta_median_nats < delta_median <= thresholds.fail_delta_median_nats:
        yield f"Recorded log-probabilities differ from ours by {delta_median:.3f} nat in the median."
    if delta_p99 is not None and delta_p99 > thresholds.delta_p99_nats:
        yield f"Recorded log-probabilities differ from ours by {delta_p99:.2f} nat at the 99th percentile."


def _backend_warnings(backend: Mapping[str, Any] | None) -> Iterable[str]:
    """In float32 the fallback is within 1e-6 of any correct path; in bfloat16 it rounds otherwise than a server's kernels."""
    kernels: Mapping[str, str] = (backend or {}).get("kernels", {})
    unknown = sorted(name for name, chosen in kernels.items() if chosen == "unknown")
    if unknown:
        yield f"It is not known which kernels computed {', '.join(unknown)}."
    fallback = sorted(name for name, chosen in kernels.items() if chosen == "torch")
    if fallback and (backend or {}).get("dtype") != "float32":
        yield f"{', '.join(fallback)} ran as torch fallback in {(backend or {}).get('dtype')}."


def _causes(
    samples: Sequence[SampleFidelity], checks: Sequence[LayerCheck], backend: Mapping[str, Any] | None
) -> tuple[Cause, ...]:
    """What was found outright, then what explains the tokens best, then failed checks; kernels and `unexplained` else."""
    found = dict.fromkeys(kind for sample in samples for kind in sample.faults)
    swapped = [f"{sample.sample_id} holds those of {sample.resembles}" for sample in samples if sample.resembles]
    causes = []
    if swapped:
        sentence = f"Rows belong to another sample: {', '.join(swapped)}."
        causes.append(Cause(name=misplacements.OTHER_SAMPLE, sentence=sentence, agree=None))
    explained = _explanations([sample for sample in samples if sample.alternatives])
    causes += [cause for cause in explained if cause.name in found]
    causes += [Cause(name=kind, sentence=SENTENCES[kind], agree=None) for kind in found if kind not in {c.name for c in causes}]
    causes += [cause for cause in explained if cause.name not in found]
    causes += [Cause(name=check.name, sentence=check.meaning, agree=None) for check in checks if not check.passed]
    if causes:
        return tuple(causes)
    unexplained = Cause(name=UNEXPLAINED, sentence=SENTENCES[UNEXPLAINED], agree=None)
    kernels: Mapping[str, str] = (backend or {}).get("kernels", {})
    if not kernels:
        return (unexplained,)
    ran = ", ".join(f"{name} by {chosen}" for name, chosen in sorted(kernels.items()))
    sentence = (
        f"A kernel or fallback of the linear-attention layers is wrong on this host: no misplacement explains it; ran: {ran}."
    )
    return (Cause(name=KERNELS, sentence=sentence, agree=None), unexplained)


def _explanations(suspects: Sequence[SampleFidelity]) -> list[Cause]:
    """Misplacements under which nearly all tokens of the samples that tried them agree, and clearly more, or far closer."""
    ranked = []
    for name in dict.fromkeys(name for sample in suspects for name in sample.alternatives):
        having = [sample for sample in suspects if name in sample.alternatives]
        tried = [sample.alternatives[name] for sample in having]
        n = sum(sample.n for sample in having)
        agree = sum(sample.agreeing for sample in having) / n
        delta = sum(sum(sample.deltas_nats or ()) for sample in having)
        share = sum(alternative.agreeing for alternative in tried) / n
        tried_delta = sum(alternative.delta_sum_nats or 0.0 for alternative in tried)
        if share >= 0.9 and (share > agree + 0.1 or tried_delta < delta / 10):
            ranked.append((tried_delta / n, -share, Cause(name=name, sentence=SENTENCES[name], agree=share)))
    return [cause for _, _, cause in sorted(ranked, key=lambda item: item[:2])]
