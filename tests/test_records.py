"""replay/records.py: rows, files, near ties and joining."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_model.errors import StorageError
from dflash_model.replay.records import NEVER, UNKNOWN, SampleRecords, Sequence

SEQUENCE = Sequence(sample_id="math/ü 1", prompt_length=3, completion_length=6, overshoot_length=2, stopped=True)


def records_at(*anchors: int) -> SampleRecords:
    """Two slots, three candidates; every number shows its anchor."""
    rows = np.array(anchors)
    slots = np.stack([rows, rows + 0.5], axis=1)
    return SampleRecords(
        sequence=SEQUENCE,
        anchors=rows.astype(np.int32),
        true_ids=(slots * 2).astype(np.int32),
        true_rank=np.zeros((len(rows), 2), np.int32),
        true_logprob=-slots.astype(np.float32),
        top_ids=np.tile(np.array([4, 5, 6], np.int32), (len(rows), 2, 1)),
        top_logprobs=np.tile(np.array([-0.5, -1.5, -2.5], np.float32), (len(rows), 2, 1)),
        log_sum_exp=slots.astype(np.float32),
    )


def test_a_saved_file_reads_back_equal_with_unknown_and_nan(tmp_path: Path) -> None:
    records = records_at(3, 5)
    records.true_ids[1, 1] = records.true_rank[1, 1] = UNKNOWN
    records.true_logprob[1, 1] = np.nan
    records.save(tmp_path / "a.safetensors")
    again = SampleRecords.load(tmp_path / "a.safetensors")
    assert again.sequence == SEQUENCE
    assert again.sequence.end == 9
    for name in ("anchors", "true_ids", "true_rank", "true_logprob", "top_ids", "top_logprobs", "log_sum_exp"):
        np.testing.assert_array_equal(getattr(again, name), getattr(records, name))
        assert getattr(again, name).dtype == getattr(records, name).dtype


def test_row_of_finds_an_anchor_or_none() -> None:
    records = records_at(3, 5, 8)
    assert [records.row_of(anchor) for anchor in (2, 3, 4, 5, 8, 9)] == [None, 0, None, 1, 2, None]


def test_a_damaged_file_and_another_version_are_storage_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    records_at(3).save(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="not a records file"):
        SampleRecords.load(path)
    arrays = {
        name: getattr(records_at(3), name)
        for name in ("anchors", "true_ids", "true_rank", "true_logprob", "top_ids", "top_logprobs", "log_sum_exp")
    }
    save_file(arrays, path, {"records_version": "0"})
    with pytest.raises(StorageError, match="records version 0, expected one of 1, 2"):
        SampleRecords.load(path)


def test_near_ties_counts_slots_whose_best_two_are_closer_than_a_ten_thousandth() -> None:
    records = records_at(3, 5)
    assert records.near_ties == 0
    records.top_logprobs[0, 1, 1] = -0.5 - 5e-5
    records.top_logprobs[1, 0, 1] = -0.5
    records.top_logprobs[1, 1, 1] = -0.5 - 2e-4
    assert records.near_ties == 2


def test_near_ties_of_a_single_candidate_are_unknown_not_zero() -> None:
    records = records_at(3)
    assert replace(records, top_logprobs=records.top_logprobs[..., :1]).near_ties is None


def test_joined_parts_are_sorted_by_anchor() -> None:
    joined = SampleRecords.joined(SEQUENCE, [records_at(8), records_at(3), records_at(5)], slots=2, kept=3)
    expected = records_at(3, 5, 8)
    np.testing.assert_array_equal(joined.anchors, [3, 5, 8])
    np.testing.assert_array_equal(joined.log_sum_exp, expected.log_sum_exp)
    assert joined.anchors.dtype == np.int32


def test_joining_nothing_keeps_the_shapes() -> None:
    empty = SampleRecords.joined(SEQUENCE, [], slots=2, kept=3)
    assert empty.anchors.shape == (0,)
    assert empty.top_ids.shape == (0, 2, 3)
    assert empty.near_ties == 0


def test_a_file_of_version_1_reads_as_records_of_independent_slots(tmp_path: Path) -> None:
    path, records = tmp_path / "a.safetensors", records_at(3, 5)
    names = ("anchors", "true_ids", "true_rank", "true_logprob", "top_ids", "top_logprobs", "log_sum_exp")
    facts = {"sample_id": "x", "prompt_length": "3", "completion_length": "6", "overshoot_length": "2", "stopped": "1"}
    save_file({name: getattr(records, name) for name in names}, path, facts | {"records_version": "1"})
    again = SampleRecords.load(path)
    assert (again.conditional, again.selected_ids) == (False, None)
    np.testing.assert_array_equal(again.drafted_ids, [[4, 4], [4, 4]])


def test_the_draft_of_dependent_slots_is_kept_beside_the_candidates(tmp_path: Path) -> None:
    first, second = (replace(records_at(a), selected_ids=np.array([[a, a + 1]], np.int32)) for a in (8, 3))
    joined = SampleRecords.joined(SEQUENCE, [first, second], slots=2, kept=3, conditional=True)
    joined.true_rank[0, 1] = NEVER
    joined.true_logprob[0, 1] = -np.inf
    joined.save(tmp_path / "a.safetensors")
    again = SampleRecords.load(tmp_path / "a.safetensors")
    assert again.conditional
    np.testing.assert_array_equal(again.drafted_ids, [[3, 4], [8, 9]])
    assert again.drafted_ids.dtype == np.int32
    assert (again.true_rank[0, 1], again.true_logprob[0, 1]) == (NEVER, -np.inf)
    empty = SampleRecords.joined(SEQUENCE, [], slots=2, kept=3, conditional=True)
    assert (empty.conditional, empty.drafted_ids.shape) == (True, (0, 2))
