"""What the gate measures: by hand on small rows, and on the demo target's right and corrupted states."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from dflash_model.target.backbone import Backbone, load_backbone
from dflash_model.target.fidelity import SampleFidelity, Thresholds, measure
from dflash_model.target.fidelity_report import FAIL, PASS, WARN, FidelityReport, judge
from dflash_model.target.greedy import generate_reference
from dflash_model.target.hidden_states import extract
from dflash_model.target.kernels import describe_backend
from dflash_model.target.misplacements import (
    NORM_FORM,
    NORM_OMITTED,
    NORM_TWICE,
    OTHER_SAMPLE,
    SHIFTED_EARLIER,
    SHIFTED_LATER,
)
from dflash_model.target.prompts import load_tokenizer, read_prompts, render
from dflash_model.target.references import Reference
from dflash_model.target.tables import PLAIN, Tables, load_tables, write_tables
from tests.tiny_targets import DEMO_PROMPTS, DEMO_TARGET

SAMPLES = ("code-2", "math-1", "math-2", "count-1", "story-1", "record-1", "unlike-4", "unlike-5")


@dataclass(frozen=True)
class Demo:
    """The demo target, its references and its right last-layer rows."""

    backbone: Backbone
    tables: Tables
    references: dict[str, Reference]
    rows: dict[str, torch.Tensor]

    def report(self, rows: dict[str, torch.Tensor], *, tables: Tables | None = None, normed: bool = False) -> FidelityReport:
        samples = [
            measure(
                rows[name],
                reference.token_ids,
                reference=reference,
                tables=tables or self.tables,
                thresholds=Thresholds(),
                normed=normed,
                others=self.references,
            )
            for name, reference in self.references.items()
        ]
        return judge(samples, thresholds=Thresholds())


def _capture(backbone: Backbone, references: dict[str, Reference]) -> dict[str, torch.Tensor]:
    return {name: extract(backbone, reference.token_ids, [1]).final for name, reference in references.items()}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    directory = tmp_path_factory.mktemp("tables")
    write_tables(DEMO_TARGET, directory)
    backbone = load_backbone(DEMO_TARGET, dtype="float32")
    prompts = [prompt for prompt in read_prompts(DEMO_PROMPTS) if prompt.id in SAMPLES]
    rendered = render(prompts, load_tokenizer(DEMO_TARGET), thinking=None, max_prompt_tokens=100)
    references = {p.id: generate_reference(backbone, p, stop_ids=(2,), max_new_tokens=32, overshoot_tokens=0) for p in rendered}
    tables = load_tables(directory, torch.float32)
    return Demo(backbone=backbone, tables=tables, references=references, rows=_capture(backbone, references))


def test_right_states_pass_in_float32(demo: Demo) -> None:
    report = demo.report(demo.rows)
    assert (report.verdict, report.reasons, report.causes) == (PASS, (), ())
    assert (report.n, report.agree, report.hard_rate, report.first_hard) == (8 * 32, 1.0, 0.0, None)
    assert report.delta_p99_nats is not None
    assert report.delta_p99_nats < 1e-4


def test_right_states_in_bfloat16_do_not_fail_and_say_what_ran(demo: Demo) -> None:
    backbone = load_backbone(DEMO_TARGET, dtype="bfloat16")
    report = demo.report(_capture(backbone, demo.references))
    assert report.verdict == PASS
    assert report.max_gap_nats is not None
    assert report.max_gap_nats < 0.1
    again = judge(report.samples, thresholds=Thresholds(), backend=describe_backend(backbone))
    assert again.verdict == WARN
    assert "chunk_gated_delta_rule, recurrent_gated_delta_rule ran as torch fallback in bfloat16" in again.reasons[0]


def _late(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[:1], rows[:-1]])


def _early(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows[1:], rows[-1:]])


@pytest.mark.parametrize(("corrupt", "cause"), [(_late, SHIFTED_LATER), (_early, SHIFTED_EARLIER)])
def test_shifted_rows_fail_and_the_shift_is_named(
    demo: Demo, corrupt: Callable[[torch.Tensor], torch.Tensor], cause: str
) -> None:
    report = demo.report({name: corrupt(rows) for name, rows in demo.rows.items()})
    assert report.verdict == FAIL
    assert report.agree is not None
    assert report.agree < 0.05
    assert [found.name for found in report.causes] == [cause]
    assert report.causes[0].agree == 1.0
    assert report.first_hard == ("code-2", len(demo.references["code-2"].prompt_ids))


def test_rows_normed_already_fail_though_their_argmax_hardly_moves(demo: Demo) -> None:
    report = demo.report({name: demo.tables.normalize(rows) for name, rows in demo.rows.items()})
    assert report.verdict == FAIL
    assert report.agree is not None
    assert report.agree > 0.97
    assert report.causes[0].name == NORM_TWICE


def test_raw_rows_called_normed_fail_and_normed_ones_called_so_pass(demo: Demo) -> None:
    normed = {name: demo.tables.normalize(rows) for name, rows in demo.rows.items()}
    assert demo.report(normed, normed=True).verdict == PASS
    report = demo.report(demo.rows, normed=True)
    assert report.verdict == FAIL
    assert report.causes[0].name == NORM_OMITTED


def test_the_wrong_norm_form_fails_by_its_log_probabilities(demo: Demo) -> None:
    report = demo.report(demo.rows, tables=replace(demo.tables, norm_form=PLAIN))
    assert report.verdict == FAIL
    assert report.agree is not None
    assert report.agree > 0.9
    assert "another distribution" in report.reasons[0]
    assert [found.name for found in report.causes] == [NORM_FORM]


def test_the_layer_below_does_not_pass(demo: Demo) -> None:
    report = demo.report({name: extract(demo.backbone, r.token_ids, [7]).taps[7] for name, r in demo.references.items()})
    assert report.verdict != PASS
    assert report.hard_rate is not None
    assert report.hard_rate > 0.002


def test_zeroed_linear_attention_fails_and_no_misplacement_explains_it(demo: Demo) -> None:
    handles = [
        layer.linear_attn.register_forward_hook(lambda _module, _args, output: torch.zeros_like(output))  # type: ignore[union-attr]
        for layer in demo.backbone.layers
        if hasattr(layer, "linear_attn")
    ]
    try:
        rows = _capture(demo.backbone, demo.references)
    finally:
        for handle in handles:
            handle.remove()
    report = demo.report(rows)
    assert report.verdict == FAIL
    assert report.agree is not None
    assert report.agree < 0.6
    assert [found.name for found in report.causes] == ["unexplained"]


def test_two_swapped_samples_fail_and_are_named(demo: Demo) -> None:
    """math-1 and record-1 differ in length, so the row counts are off as well; the owner is the better news."""
    rows = demo.rows | {"math-1": demo.rows["record-1"], "record-1": demo.rows["math-1"]}
    report = demo.report(rows)
    assert report.verdict == FAIL
    assert report.causes[0].name == OTHER_SAMPLE
    assert "math-1 holds those of record-1" in report.causes[0].sentence
    assert "record-1 holds those of math-1" in report.causes[0].sentence


def test_one_swapped_sample_of_the_same_length_fails_though_the_pool_would_warn(demo: Demo) -> None:
    """Twenty-four right samples hide a wrong one in the pooled figures; the sample's own line does not."""
    other = demo.references["record-1"]
    length = len(demo.references["count-1"].token_ids)
    impostor = replace(other, sample_id="impostor", prompt_ids=other.prompt_ids[-(length - 32) :])
    assert len(impostor.token_ids) == length
    common = {"tables": demo.tables, "thresholds": Thresholds(), "others": demo.references}
    wrong = measure(demo.rows["count-1"], impostor.token_ids, reference=impostor, **common)  # type: ignore[arg-type]
    right = [measure(demo.rows[name], r.token_ids, reference=r, **common) for name, r in demo.references.items()] * 3  # type: ignore[arg-type]
    report = judge([*right, wrong], thresholds=Thresholds())
    assert report.agree is not None
    assert report.agree > 0.9
    assert report.verdict == FAIL
    assert any(reason.startswith("Sample impostor agrees on only") for reason in report.reasons)
    assert report.causes[0].sentence == "Rows belong to another sample: impostor holds those of count-1."


def _damaged(rows: torch.Tensor, value: float) -> torch.Tensor:
    rows = rows.clone()
    rows[5] = value
    return rows


@pytest.mark.parametrize(
    ("value", "message", "cause"),
    [
        (float("nan"), "NaN or infinite values, first in row 5", "non_finite"),
        (float("inf"), "NaN or infinite values, first in row 5", "non_finite"),
        (0.0, "1 all-zero rows, first row 5", "zero_rows"),
    ],
)
def test_one_damaged_row_fails_even_in_the_prompt(demo: Demo, value: float, message: str, cause: str) -> None:
    report = demo.report(demo.rows | {"story-1": _damaged(demo.rows["story-1"], value)})
    assert report.verdict == FAIL
    assert message in report.reasons[0]
    assert [found.name for found in report.causes] == [cause]
    assert report.n == 7 * 32


def test_a_missing_row_and_other_tokens_fail(demo: Demo) -> None:
    report = demo.report(demo.rows | {"count-1": demo.rows["count-1"][:-1]})
    assert (report.verdict, report.causes[0].name) == (FAIL, "row_count")
    reference = demo.references["count-1"]
    other = measure(
        demo.rows["count-1"], (1, *reference.token_ids[:-1]), reference=reference, tables=demo.tables, thresholds=Thresholds()
    )
    assert list(other.faults) == ["other_tokens"]
    assert judge([other], thresholds=Thresholds()).verdict == FAIL


def _hand_tables() -> Tables:
    eye = torch.eye(3)
    return Tables(
        embed=eye, head=eye, norm=torch.ones(3), norm_form=PLAIN, rms_norm_eps=0.0, embedding_scale=1.0, logit_softcap=None,
        tied=True, facts={},
    )  # fmt: skip


def test_figures_of_one_sample_by_hand() -> None:
    """Tokens 0 | 1 2 0. Normed rows are +-sqrt(3) at one place, so log-probabilities are log of e^r / (e^r + 2), r = sqrt(3)."""
    reference = Reference(
        sample_id="a", prompt_ids=(0,), completion_ids=(1, 2, 0), overshoot_ids=(), finish="length",
        logprobs=(-0.1, -0.2, -0.3), engine="x",
    )  # fmt: skip
    rows = torch.tensor([[0.0, 2.0, 0.0], [5.0, 0.0, 0.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    sample = measure(rows, (0, 1, 2, 0), reference=reference, tables=_hand_tables(), thresholds=Thresholds())
    root = math.exp(math.sqrt(3))
    best, other = math.log(root / (root + 2)), math.log(1 / (root + 2))
    assert (sample.n, sample.agreeing, sample.hard, sample.first_hard_position) == (3, 2, 1, 2)
    assert sample.max_gap_nats == pytest.approx(math.sqrt(3))
    assert sample.nll_sum_nats == pytest.approx(-(2 * best + other))
    assert sample.deltas_nats == pytest.approx((abs(best + 0.1), abs(other + 0.2), abs(best + 0.3)), abs=1e-5)
    assert sample.agree == pytest.approx(2 / 3)
    assert sample.hard_rate == pytest.approx(1 / 3)


def test_a_soft_disagreement_is_not_hard() -> None:
    """The second row prefers token 1 by .4 nat only."""
    reference = Reference(
        sample_id="a", prompt_ids=(0,), completion_ids=(0, 0), overshoot_ids=(), finish="length", logprobs=None, engine="x"
    )
    rows = torch.tensor([[2.0, 0.0, 0.0], [0.2, 0.6, 0.0], [1.0, 0.0, 0.0]])
    tables = _hand_tables()
    sample = measure(rows, (0, 0, 0), reference=reference, tables=tables, thresholds=Thresholds(hard_gap_nats=1.2))
    strict = measure(rows, (0, 0, 0), reference=reference, tables=tables, thresholds=Thresholds(hard_gap_nats=1.0))
    assert (sample.agreeing, sample.hard, strict.hard) == (1, 0, 1)
    assert sample.max_gap_nats == pytest.approx(0.4 / math.sqrt(0.4 / 3), abs=1e-5)
    assert sample.deltas_nats is None


def test_a_sample_survives_json(demo: Demo, tmp_path: Path) -> None:
    for rows in (demo.rows["count-1"], _late(demo.rows["count-1"]), demo.rows["count-1"][:-1]):
        reference = demo.references["count-1"]
        sample = measure(rows, reference.token_ids, reference=reference, tables=demo.tables, thresholds=Thresholds())
        assert SampleFidelity.from_json(json.loads(json.dumps(sample.to_json(), allow_nan=False))) == sample
