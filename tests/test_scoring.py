"""replay/scoring.py against a sort per row in plain Python, with ties everywhere."""

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_model.drafter.candidates import best_candidates
from dflash_model.drafter.tables import DraftTables
from dflash_model.replay.records import NEVER, UNKNOWN
from dflash_model.replay.scoring import Scores, score


def tables_of(head: torch.Tensor, **changes: object) -> DraftTables:
    plain: dict[str, object] = {
        "embedding": head, "mask_row": head[0], "embedding_scale": 1.0, "block_size": 2, "head": head, "output_multiplier": 1.0,
        "softcap": None, "target_ids": None, "known_ids": len(head),
    }  # fmt: skip
    return DraftTables(**plain | changes)  # type: ignore[arg-type]


def of_logits(logits: list[list[float]], true_ids: list[int], *, top_k: int = 3, logits_bytes: int = 1 << 20) -> Scores:
    """Scores of given logits: the head is the identity."""
    rows = torch.tensor(logits)
    return score(rows, tables_of(torch.eye(rows.shape[1])), torch.tensor(true_ids), top_k=top_k, logits_bytes=logits_bytes)


def test_by_hand() -> None:
    found = of_logits([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]], [3, 2])
    assert found.true_rank.tolist() == [1, 2]
    assert found.top_ids.tolist() == [[1, 3, 2], [0, 1, 2]]
    log_sum = math.log(1 + 2 * math.e**2 + math.e)
    np.testing.assert_allclose(found.log_sum_exp, [log_sum, 5 + math.log(4)], rtol=1e-6)
    np.testing.assert_allclose(found.true_logprob, [2 - log_sum, -math.log(4)], rtol=1e-6)
    np.testing.assert_allclose(found.top_logprobs[0], [2 - log_sum, 2 - log_sum, 1 - log_sum], rtol=1e-6)
    assert found.finite.all()
    assert [array.dtype.name for array in (found.true_rank, found.top_ids, found.true_logprob)] == ["int32", "int32", "float32"]


@given(
    logits=st.lists(st.lists(st.integers(0, 3), min_size=7, max_size=7), min_size=1, max_size=5),
    true_id=st.integers(0, 6),
    top_k=st.integers(2, 9),
    rows=st.integers(1, 3),
)
def test_ranks_and_candidates_equal_a_sort_by_value_then_id(logits: list[list[int]], true_id: int, top_k: int, rows: int) -> None:
    """Four values over seven ids: nearly every row has ties, also at the cut."""
    found = of_logits(
        [[float(v) for v in row] for row in logits], [true_id] * len(logits), top_k=top_k, logits_bytes=4 * 7 * rows
    )
    for index, row in enumerate(logits):
        order = sorted(range(7), key=lambda token: (-row[token], token))
        assert found.top_ids[index].tolist() == order[:top_k]
        assert found.true_rank[index] == order.index(true_id)


def test_an_unknown_true_token_has_no_rank_and_no_log_probability() -> None:
    found = of_logits([[0.0, 1.0], [0.0, 1.0]], [UNKNOWN, 0], top_k=2)
    assert found.true_rank.tolist() == [UNKNOWN, 1]
    assert np.isnan(found.true_logprob).tolist() == [True, False]


def test_rows_that_are_not_finite_are_marked() -> None:
    inf = math.inf
    found = of_logits([[0.0, 1.0], [math.nan, 1.0], [inf, 1.0], [-inf, 1.0]], [0, 0, 0, 0], top_k=2)
    assert found.finite.tolist() == [True, False, False, False]


def test_the_size_of_row_blocks_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(11, 6, generator=generator), torch.randn(30, 6, generator=generator)
    true_ids = torch.arange(11)
    tables = tables_of(head)
    whole = score(hidden, tables, true_ids, top_k=4)
    for limit in (1, 4 * 30 * 3):
        parts = score(hidden, tables, true_ids, top_k=4, logits_bytes=limit)
        np.testing.assert_array_equal(parts.true_rank, whole.true_rank)
        np.testing.assert_array_equal(parts.top_ids, whole.top_ids)
        np.testing.assert_allclose(parts.top_logprobs, whole.top_logprobs, atol=1e-6)


def test_a_bf16_head_is_scored_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 6, generator=generator).bfloat16() for n in (4, 300))
    found = score(hidden, tables_of(head), torch.zeros(4, dtype=torch.int64), top_k=2)
    logits = (hidden @ head.T).double()
    np.testing.assert_allclose(found.log_sum_exp, logits.logsumexp(-1).numpy(), rtol=1e-6)


def test_in_a_wide_vocabulary_of_equals_the_lowest_ids_are_kept() -> None:
    """torch.topk alone keeps others here."""
    assert best_candidates(torch.zeros(1, 5000), 4)[1].tolist() == [[0, 1, 2, 3]]


def test_a_reduced_vocabulary_speaks_of_the_targets_ids_and_never_of_those_it_lacks() -> None:
    """Head rows 0, 1, 2 are tokens 2, 5, 6 of seven."""
    tables = tables_of(torch.eye(3), target_ids=torch.tensor([2, 5, 6]), known_ids=7)
    found = score(torch.tensor([[0.0, 2.0, 1.0]]).expand(4, 3), tables, torch.tensor([6, 1, UNKNOWN, 2]), top_k=2)
    assert found.top_ids.tolist() == [[5, 6]] * 4
    assert found.true_rank.tolist() == [1, NEVER, UNKNOWN, 2]
    log_sum = math.log(1 + math.e + math.e**2)
    np.testing.assert_allclose(found.true_logprob, [1 - log_sum, -math.inf, math.nan, -log_sum], rtol=1e-6)


def test_a_head_with_fewer_rows_than_the_target_has_tokens_never_drafts_the_others() -> None:
    found = score(torch.eye(3), tables_of(torch.eye(3)), torch.tensor([2, 3, 9]), top_k=2)
    assert found.true_rank.tolist() == [2, NEVER, NEVER]


def test_the_multiplier_comes_before_the_soft_cap() -> None:
    found = score(
        torch.tensor([[3.0, 1.0]]), tables_of(torch.eye(2), output_multiplier=2.0, softcap=4.0), torch.tensor([1]), top_k=2
    )
    high, low = 4 * math.tanh(6 / 4), 4 * math.tanh(2 / 4)
    log_sum = math.log(math.exp(high) + math.exp(low))
    np.testing.assert_allclose(found.top_logprobs, [[high - log_sum, low - log_sum]], rtol=1e-6)
