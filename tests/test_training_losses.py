"""Anchors, labels, weights, losses and metrics of a training step against hand-worked values and a naive loop."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dflash_model.drafter.selector import CandidateSelector
from dflash_model.training.anchors import BLOCK_INSIDE, NEXT_SUPERVISED, Anchors, candidates, draw_anchors
from dflash_model.training.losses import LossForm, Slots, in_reduced_vocabulary, reduce_losses, slot_losses, slots_of
from dflash_model.training.selector_loss import selector_losses, slots_before
from dflash_model.training.slot_metrics import metric_sums, metrics_from

SUPERVISED = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 0]], dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1, -1]])
TOKENS = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17, 18, 19]])


def test_both_published_anchor_rules() -> None:
    after = candidates(SUPERVISED, DOCUMENTS, rule=NEXT_SUPERVISED, block_size=4)
    assert after[0].nonzero().flatten().tolist() == [2, 5, 7], "3 and 6 have no supervised successor in their document"
    inside = candidates(SUPERVISED, DOCUMENTS, rule=BLOCK_INSIDE, block_size=4)
    assert inside[0].nonzero().flatten().tolist() == [2, 3, 5], "the last four positions are out"
    with pytest.raises(ValueError, match="anchor rule"):
        candidates(SUPERVISED, DOCUMENTS, rule="any", block_size=4)


def test_anchors_are_distinct_sorted_uniform_and_filled_up_with_invalid_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(10)
    for _ in range(600):
        drawn = draw_anchors(SUPERVISED, DOCUMENTS, count=2, rule=NEXT_SUPERVISED, block_size=4, generator=generator)
        pair = drawn.positions[0].tolist()
        assert drawn.valid.all()
        assert pair == sorted(set(pair))
        counts[pair] += 1
    assert counts.nonzero().flatten().tolist() == [2, 5, 7]
    assert float(counts[[2, 5, 7]].min()) > 330, "each is in two of three draws: 400 expected, deviation 11.5"
    few = draw_anchors(SUPERVISED, DOCUMENTS, count=5, rule=NEXT_SUPERVISED, block_size=4, generator=generator)
    assert few.positions.tolist() == [[2, 5, 7, 0, 0]]
    assert few.valid.tolist() == [[True, True, True, False, False]]


def anchors(*positions: int, invalid: int = 0) -> Anchors:
    valid = [True] * len(positions) + [False] * invalid
    return Anchors(positions=torch.tensor([[*positions, *[0] * invalid]]), valid=torch.tensor([valid]))


def made_slots(form: LossForm, *positions: int, invalid: int = 0) -> Slots:
    return slots_of(TOKENS, SUPERVISED, DOCUMENTS, anchors(*positions, invalid=invalid), drafted_tokens=3, form=form)


def test_output_d_is_compared_with_the_token_at_anchor_plus_d_plus_1() -> None:
    slots = made_slots(LossForm(), 2, 5, 7, invalid=1)
    assert slots.ids[0, 0].tolist() == [13, 14, 15]
    assert slots.verifier_rows[0, 0].tolist() == [2, 3, 4], "the verifier's row before the token predicts it"
    assert slots.supervised[0].tolist() == [
        [True, False, True],
        [True, False, False],  # 7 and 8 lie in another document
        [True, False, False],  # 9 is padding, 10 is past the row
        [False, False, False],
    ]
    prefix = made_slots(LossForm(later_slots="prefix"), 2)
    assert prefix.supervised[0].tolist() == [[True, False, False]]


def test_the_two_label_bugs_take_the_next_token() -> None:
    shifted = made_slots(LossForm(hard_label_shift=1), 2)
    assert shifted.ids[0, 0].tolist() == [14, 15, 16]
    assert shifted.supervised[0, 0].tolist() == [False, True, True]
    assert made_slots(LossForm(verifier_shift=1), 2).verifier_rows[0, 0].tolist() == [3, 4, 5]


def logits_of(*rows: list[float]) -> Tensor:
    """One block; probabilities given, logits made."""
    return torch.tensor(rows).log()[None, None]


HAND = Slots(
    ids=torch.tensor([[[0, 1, 2]]]),
    supervised=torch.tensor([[[True, False, True]]]),
    verifier_rows=torch.tensor([[[0, 1, 2]]]),
)
GIVEN = logits_of([0.5, 0.25, 0.25], [0.2, 0.4, 0.4], [0.125, 0.625, 0.25])


def loss_of(form: LossForm, *, verifier: Tensor | None = None) -> float:
    total, divisor = reduce_losses(slot_losses(GIVEN, HAND, form, verifier_logits=verifier), HAND, form)
    return float(total / divisor)


def test_hand_worked_losses_of_each_form() -> None:
    """-ln 0.5 at output 0 and -ln 0.25 at output 2, weighted 1 and exp(-2 / 4); output 1 is not supervised."""
    first, third, weight = math.log(2), math.log(4), math.exp(-0.5)
    assert loss_of(LossForm()) == pytest.approx((first + weight * third) / (1 + weight), rel=1e-5)
    assert loss_of(LossForm(normalised_by="count")) == pytest.approx((first + weight * third) / 2, rel=1e-4)
    assert loss_of(LossForm(gamma=None)) == pytest.approx((first + third) / 2, rel=1e-5)
    assert loss_of(LossForm(gamma=1.0)) == pytest.approx((first + math.exp(-2) * third) / (1 + math.exp(-2)), rel=1e-5)


def test_hand_worked_verifier_labels() -> None:
    """The verifier prefers token 1 at output 0; its divergence is worked out term by term."""
    verifier = logits_of([0.25, 0.5, 0.25], [0.2, 0.4, 0.4], [0.125, 0.625, 0.25])
    weight = math.exp(-0.5)
    best = (math.log(4) - weight * math.log(0.625)) / (1 + weight)
    assert loss_of(LossForm(labels="verifier_best"), verifier=verifier) == pytest.approx(best, rel=1e-5)
    divergence = 0.25 * math.log(0.25 / 0.5) + 0.5 * math.log(0.5 / 0.25)
    assert loss_of(LossForm(labels="verifier"), verifier=verifier) == pytest.approx(divergence / (1 + weight), rel=1e-5)
    with pytest.raises(ValueError, match="verifier"):
        loss_of(LossForm(labels="verifier"))


@pytest.mark.parametrize(
    "change", [{"labels": "soft"}, {"normalised_by": "mean"}, {"later_slots": "all"}, {"gamma": 0.0}], ids=str
)
def test_an_unknown_form_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"expected one of|gamma"):
        LossForm(**change)  # type: ignore[arg-type]


def test_nothing_supervised_is_a_loss_of_zero_and_no_metric() -> None:
    none = Slots(ids=HAND.ids, supervised=torch.zeros_like(HAND.supervised), verifier_rows=HAND.verifier_rows)
    for form in (LossForm(), LossForm(normalised_by="count")):
        total, divisor = reduce_losses(slot_losses(GIVEN, none, form), none, form)
        assert float(total / divisor) == 0.0
    found = metrics_from(metric_sums(HAND.ids, HAND.ids, none.supervised).tolist())
    assert found.slot_accuracy == (None, None, None)
    assert (found.full_accuracy, found.eal_marginal, found.eal_runs) == (None, None, None)


def test_hand_worked_metrics() -> None:
    """Four blocks: R R W / R W R / R R - / - - - ; R right, W wrong, - not supervised.

    Slot accuracies 3/3, 2/3, 1/2; in all 6 of 8. Marginal length 1 + 2/3 + 1/3 = 2; runs + 1: 3, 2, 3 -> 8/3.
    """
    wanted = torch.tensor([[[1, 1, 1]] * 4])
    predicted = torch.tensor([[[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1]]])
    supervised = torch.tensor([[[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0]]], dtype=torch.bool)
    found = metrics_from(metric_sums(predicted, wanted, supervised).tolist())
    assert found.slot_accuracy == pytest.approx((1.0, 2 / 3, 0.5))
    assert found.full_accuracy == pytest.approx(6 / 8)
    assert found.eal_marginal == pytest.approx(2.0)
    assert found.eal_runs == pytest.approx(8 / 3)


def test_loss_and_metrics_equal_a_naive_loop() -> None:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, 6, (2, 12), generator=generator)
    supervised = torch.rand(2, 12, generator=generator) < 0.85
    documents = torch.tensor([[0] * 7 + [1] * 5, [0] * 10 + [-1] * 2])
    chosen = draw_anchors(supervised, documents, count=4, rule=NEXT_SUPERVISED, block_size=4, generator=generator)
    logits = torch.randn(2, chosen.positions.shape[1], 3, 6, generator=generator)
    form = LossForm(gamma=2.0, later_slots="prefix")
    slots = slots_of(tokens, supervised, documents, chosen, drafted_tokens=3, form=form)
    total, divisor = reduce_losses(slot_losses(logits, slots, form), slots, form)
    loss = weights = 0.0
    runs, blocks, right, seen = 0, 0, [0] * 3, [0] * 3
    for row in range(2):
        for index, anchor in enumerate(chosen.positions[row].tolist()):
            ended, run, any_slot = not bool(chosen.valid[row, index]), 0, False
            broken = False
            for d in range(3):
                at = anchor + d + 1
                ended = ended or at >= 12 or documents[row, at] != documents[row, anchor] or not supervised[row, at]
                if ended:
                    continue
                any_slot = True
                scores = logits[row, index, d].tolist()
                label = int(tokens[row, at])
                nll = math.log(sum(math.exp(s) for s in scores)) - scores[label]
                loss += math.exp(-d / 2) * nll
                weights += math.exp(-d / 2)
                seen[d] += 1
                hit = scores.index(max(scores)) == label
                right[d] += hit
                broken = broken or not hit
                run += not broken
            runs += run + 1 if any_slot else 0
            blocks += any_slot
    assert blocks > 3
    assert float(total / divisor) == pytest.approx(loss / weights, rel=1e-5)
    sums = metric_sums(logits.argmax(-1), slots.ids, slots.supervised).tolist()
    assert sums == [*right, *seen, runs, blocks]


def test_in_a_reduced_vocabulary_labels_become_rows_and_the_others_are_not_supervised() -> None:
    """Tokens 1 and 4 are kept as rows 0 and 1 of five."""
    slots = Slots(
        ids=torch.tensor([[[4, 2, 1]]]),
        supervised=torch.tensor([[[True, True, False]]]),
        verifier_rows=torch.zeros(1, 1, 3, dtype=torch.long),
    )
    reduced = in_reduced_vocabulary(slots, torch.tensor([-2, 0, -2, -2, 1]))
    assert reduced.supervised.tolist() == [[[True, False, False]]]
    assert (int(reduced.ids[0, 0, 0]), int(reduced.ids[0, 0, 2])) == (1, 0)


def test_the_selector_is_scored_among_the_heads_best_with_the_true_token_put_in() -> None:
    """Hand-worked: edge(previous, c) = predecessor * 1 * successor; the candidates of the 2 best are 3 and 0."""
    selector = CandidateSelector(2, vocab_size=4, rank=1)
    with torch.no_grad():
        selector.predecessor_codebook.copy_(torch.tensor([[1.0], [2.0], [0.0], [0.0]]))
        selector.successor_codebook.copy_(torch.tensor([[1.0], [5.0], [0.0], [0.0]]))
        selector.hidden_projection.weight.copy_(torch.tensor([[1.0, 0.0]]))
    hidden = torch.tensor([1.0, 7.0]).expand(1, 1, 2, 2)
    logits = torch.tensor([2.0, 0.0, 1.0, 3.0]).expand(1, 1, 2, 4)
    previous, wanted = torch.tensor([[[0, 1]]]), torch.tensor([[[3, 1]]])
    found = selector_losses(selector, hidden, logits, previous, wanted, top_k=2)
    first = math.log(math.exp(3.0) + math.exp(2.0 + 1.0)) - 3.0  # 3 against 0, whose edge is 1 * 1
    second = math.log(math.exp(3.0) + math.exp(0.0 + 10.0)) - 10.0  # 1 is put in for 0, with the edge 2 * 5
    assert found.losses[0, 0].tolist() == pytest.approx([first, second], rel=1e-4)
    assert found.predicted[0, 0, 1].item() == 0, "unary 2 + edge 2 beats 3; token 1 was only put in for the loss"
    before = slots_before(TOKENS, torch.tensor([[2, 8]]), drafted_tokens=3)
    assert before.tolist() == [[[12, 13, 14], [18, 19, 19]]]
