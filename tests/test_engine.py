"""replay/engine.py: records against the naive reference, walks that share them, and what does not fit."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy
from dflash_model.errors import CheckpointError, ConfigError, InputError
from dflash_model.replay.engine import Sample, replay
from dflash_model.replay.records import UNKNOWN, SampleRecords, Sequence
from dflash_model.replay.walk import DEEPSPEC, PYPI, TRUNCATED, ZLAB, Matcher, chain_matched, streak_matched, walk
from tests.naive_drafter import draft
from tests.tiny_drafters import FULL, SPEC, random_drafter, with_masks

VOCABULARY = 50
WALKS: list[Matcher] = [chain_matched, partial(streak_matched, width=8), partial(streak_matched, width=25)]
TABLES = torch.Generator().manual_seed(5)
EMBEDDING = torch.randn(VOCABULARY, 24, generator=TABLES)
HEAD = torch.randn(VOCABULARY, 24, generator=TABLES)


def every_anchor(_records: SampleRecords, _row: int) -> int:
    """A matcher that accepts nothing, so that its walk visits every position."""
    return 0


def sample(number: int, *, prompt: int = 6, completion: int = 20, overshoot: int = 4, stopped: bool = False) -> Sample:
    generator = torch.Generator().manual_seed(100 + number)
    length = prompt + completion + overshoot
    tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
    states = torch.randn(length, 72, generator=generator)
    sequence = Sequence(
        sample_id=f"s{number}", prompt_length=prompt, completion_length=completion, overshoot_length=overshoot, stopped=stopped
    )
    return Sample(sequence=sequence, token_ids=tokens, load_states=lambda: states)


SAMPLES = [sample(0), sample(1, prompt=11, completion=7), sample(2, completion=31, stopped=True), sample(3, completion=2)]


def run(drafter: Drafter, samples: list[Sample], **options: object) -> dict[str, SampleRecords]:
    settings: dict[str, object] = {"embedding": EMBEDDING, "head": HEAD, "walks": WALKS, "top_k": 12, **options}
    return {found.sequence.sample_id: found for found in replay(drafter, samples, **settings)}  # type: ignore[arg-type]


def steps(found: dict[str, SampleRecords], tail: str = TRUNCATED) -> dict[str, list[tuple[int, ...]]]:
    return {name: [walk(records, matcher, tail=tail).steps for matcher in WALKS] for name, records in found.items()}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return random_drafter(tmp_path_factory.mktemp("drafter"))[0]


def expected_logits(spec: DrafterSpec, weights: dict[str, torch.Tensor], entry: Sample, anchor: int) -> torch.Tensor:
    """[D, V] for the tokens after `anchor`."""
    ids = torch.tensor([entry.token_ids[anchor]] + [spec.mask_token_id] * (spec.block_size - 1))
    hidden = draft(weights, spec, entry.load_states(), EMBEDDING[ids], anchor)
    return hidden[1 - spec.shift :] @ HEAD.T


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        replace(SPEC, shift=1),
        with_masks(SPEC, MaskPolicy(in_block="causal", window=6), FULL),
        replace(SPEC, mask_token_id=9),
    ],
    ids=["plain", "shift 1", "sliding", "other mask id"],
)
def test_every_record_equals_the_naive_reference(spec: DrafterSpec, tmp_path: Path) -> None:
    drafter, weights = random_drafter(tmp_path, spec)
    found = run(drafter, SAMPLES, walks=[every_anchor])
    for entry in SAMPLES:
        records, sequence = found[entry.sequence.sample_id], entry.sequence
        assert records.anchors.tolist() == list(range(sequence.prompt_length, sequence.end - 1))
        for row, anchor in enumerate(records.anchors.tolist()):
            logits = expected_logits(spec, weights, entry, anchor)
            logprobs = logits.log_softmax(-1)
            following = entry.token_ids[anchor + 1 : anchor + 1 + spec.drafted_tokens]
            for slot in range(spec.drafted_tokens):
                order = sorted(range(VOCABULARY), key=lambda token: (-float(logits[slot, token]), token))
                assert records.top_ids[row, slot].tolist() == order[:12]
                np.testing.assert_allclose(records.top_logprobs[row, slot], logprobs[slot, order[:12]].numpy(), atol=1e-4)
                np.testing.assert_allclose(records.log_sum_exp[row, slot], float(logits[slot].logsumexp(-1)), atol=1e-4)
                if slot < len(following):
                    assert records.true_ids[row, slot] == following[slot]
                    assert records.true_rank[row, slot] == order.index(following[slot])
                    assert records.true_logprob[row, slot] == pytest.approx(float(logprobs[slot, following[slot]]), abs=1e-4)
                else:
                    assert records.true_ids[row, slot] == records.true_rank[row, slot] == UNKNOWN
                    assert np.isnan(records.true_logprob[row, slot])


def test_tokens_past_the_known_ones_are_met_and_are_unknown(drafter: Drafter) -> None:
    """Guards the branch above: without overshoot the last anchors reach past the end."""
    records = run(drafter, [sample(0, overshoot=0)], walks=[every_anchor])["s0"]
    assert (records.true_ids[-1] == UNKNOWN).tolist() == [False, True, True, True]


def test_chunk_size_and_order_of_samples_change_no_step(drafter: Drafter) -> None:
    right = run(drafter, SAMPLES)
    assert max(len(set(step)) for walks in steps(right).values() for step in walks) > 1
    for chunk in (1, 3, 7, 64):
        for samples in (SAMPLES, SAMPLES[::-1]):
            again = run(drafter, samples, chunk_anchors=chunk, context_bytes=1 if chunk == 3 else 1 << 30)
            assert steps(again) == steps(right)
            for name, records in again.items():
                np.testing.assert_array_equal(records.anchors, right[name].anchors)
                np.testing.assert_array_equal(records.top_ids, right[name].top_ids)
                np.testing.assert_allclose(records.top_logprobs, right[name].top_logprobs, atol=1e-5)


def test_walks_share_records_and_no_anchor_is_computed_twice(drafter: Drafter) -> None:
    progress: list[tuple[int, int]] = []
    found = run(drafter, SAMPLES, on_progress=lambda samples, anchors: progress.append((samples, anchors)))
    kept = 0
    shared = 0
    for records in found.values():
        walks = [walk(records, matcher) for matcher in WALKS]
        assert all(w.missing is None for w in walks)
        visited = [anchor for w in walks for anchor in w.anchors]
        assert records.anchors.tolist() == sorted(set(visited))
        kept += len(records.anchors)
        shared += len(visited) - len(set(visited))
    assert progress[-1] == (4, kept)
    assert progress == sorted(progress)
    assert shared > 10


def test_a_walk_alone_computes_only_its_own_anchors(drafter: Drafter) -> None:
    together, alone = run(drafter, SAMPLES), run(drafter, SAMPLES, walks=[chain_matched])
    assert sum(len(r.anchors) for r in alone.values()) < sum(len(r.anchors) for r in together.values())
    assert [walk(r, chain_matched).steps for r in alone.values()] == [walk(together[n], chain_matched).steps for n in alone]


def test_the_tail_rule_decides_where_walks_end(drafter: Drafter) -> None:
    full = run(drafter, SAMPLES, tail=ZLAB)
    assert steps(full, ZLAB) != steps(run(drafter, SAMPLES))
    assert all(walk(records, matcher, tail=ZLAB).missing is None for records in full.values() for matcher in WALKS)


def test_the_zlab_tail_needs_a_blocks_worth_of_tokens_past_the_end(drafter: Drafter) -> None:
    with pytest.raises(InputError, match=r"Sample s0 knows 3 tokens past its end, but tail 'zlab'") as caught:
        run(drafter, [sample(0, overshoot=3)], tail=ZLAB)
    assert "at least 4 overshoot tokens" in caught.value.fix
    assert run(drafter, [sample(0, overshoot=4)], tail=ZLAB)
    assert run(drafter, [sample(0, overshoot=0)], tail=TRUNCATED)


def test_states_are_loaded_once_when_the_samples_turn_comes(drafter: Drafter) -> None:
    loaded: list[str] = []

    def recorded(entry: Sample) -> Sample:
        def load() -> torch.Tensor:
            loaded.append(entry.sequence.sample_id)
            return entry.load_states()

        return replace(entry, load_states=load)

    def given() -> Iterator[Sample]:
        yield from map(recorded, SAMPLES)

    stream = replay(drafter, given(), embedding=EMBEDDING, head=HEAD, walks=WALKS, context_bytes=1)
    seen = []
    for records in stream:
        seen.append(records.sequence.sample_id)
        assert loaded == seen
    assert seen == ["s0", "s1", "s2", "s3"]
    loaded.clear()
    next(replay(drafter, given(), embedding=EMBEDDING, head=HEAD, walks=WALKS))
    assert sorted(loaded) == ["s0", "s1", "s2", "s3"]


def test_a_request_without_steps_gives_empty_records_and_loads_nothing(drafter: Drafter) -> None:
    def never() -> torch.Tensor:
        raise AssertionError

    for completion in (0, 1):
        records = run(drafter, [replace(sample(0, completion=completion), load_states=never)])["s0"]
        assert records.anchors.shape == (0,)
        assert records.top_ids.shape == (0, 4, 12)


def test_more_candidates_than_tokens_keeps_the_whole_vocabulary(drafter: Drafter) -> None:
    records = run(drafter, SAMPLES, top_k=64)["s0"]
    assert records.top_ids.shape[-1] == VOCABULARY
    assert (np.sort(records.top_ids, axis=-1) == np.arange(VOCABULARY)).all()


def test_tables_of_another_float_type_are_cast(drafter: Drafter) -> None:
    halves = run(drafter, SAMPLES, embedding=EMBEDDING.bfloat16(), head=HEAD.bfloat16())
    upcast = run(drafter, SAMPLES, embedding=EMBEDDING.bfloat16().float(), head=HEAD.bfloat16().float())
    np.testing.assert_array_equal(halves["s0"].top_logprobs, upcast["s0"].top_logprobs)


def test_logits_that_are_not_finite_name_drafter_and_anchor(drafter: Drafter) -> None:
    head = HEAD.clone()
    head[7, 0] = torch.inf
    with pytest.raises(CheckpointError, match=r"model\.safetensors gives NaN or infinite logits at anchor 6 of sample s0"):
        run(drafter, SAMPLES, head=head)


def bad(change: Callable[[Sample], Sample]) -> Sample:
    return change(sample(0))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (bad(lambda s: replace(s, token_ids=s.token_ids[:-1])), "has 29 token ids, but its lengths add up to 30"),
        (bad(lambda s: replace(s, token_ids=[*s.token_ids[:-1], 50])), "token ids outside 0..49"),
        (bad(lambda s: replace(s, token_ids=[-1, *s.token_ids[1:]])), "token ids outside 0..49"),
        (bad(lambda s: replace(s, load_states=lambda: s.load_states()[:24])), r"shape \[24, 72\], needed \[>= 25, 72\]"),
        (bad(lambda s: replace(s, load_states=lambda: s.load_states()[:, :48])), r"shape \[30, 48\], needed"),
        (bad(lambda s: replace(s, load_states=lambda: s.load_states() / 0)), "Hidden states of sample s0 hold NaN or infinite"),
    ],
)
def test_a_sample_that_does_not_fit_is_named(drafter: Drafter, entry: Sample, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(drafter, [entry])


def test_states_up_to_the_last_token_but_one_are_enough(drafter: Drafter) -> None:
    short = bad(lambda s: replace(s, load_states=lambda: s.load_states()[:25]))
    assert steps(run(drafter, [short])) == steps(run(drafter, [sample(0)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding": EMBEDDING[:, :12]}, r"embedding has shape \[50, 12\], but .* has hidden size 24"),
        ({"head": HEAD[:, :12]}, r"head has shape \[50, 12\]"),
        ({"embedding": EMBEDDING[:3]}, "mask_token_id 3, but the target's embedding has 3 rows"),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_any_sample(drafter: Drafter, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(drafter, [], **({"embedding": EMBEDDING, "head": HEAD, "walks": WALKS} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"tail": "dflash"}, {"walks": []}, {"top_k": 1}, {"chunk_anchors": 0}])
def test_arguments_out_of_range_are_refused(drafter: Drafter, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="walks"):
        replay(drafter, [], **({"embedding": EMBEDDING, "head": HEAD, "walks": WALKS} | wrong))  # type: ignore[arg-type]


def test_known_anchors_are_not_computed_again_and_only_what_was_asked_for_is_given(drafter: Drafter) -> None:
    """The chain first, then all walks, then the chain again: each computes what the others did not, the last one nothing."""
    kept: dict[str, SampleRecords] = {}
    counted: list[int] = []

    def keep(records: SampleRecords, computed: int) -> None:
        kept[records.sequence.sample_id] = records
        counted.append(computed)

    def again(**options: object) -> dict[str, SampleRecords]:
        counted.clear()
        known = [replace(s, load_known=lambda s=s: kept.get(s.sequence.sample_id)) for s in SAMPLES]  # type: ignore[misc]
        return run(drafter, known, on_sample=keep, **options)

    alone = again(walks=[chain_matched])
    chain_anchors = sum(len(r.anchors) for r in alone.values())
    assert sum(counted) == chain_anchors
    together = again()
    assert 0 < sum(counted) == sum(len(r.anchors) for r in together.values()) - chain_anchors
    assert steps(together) == steps(run(drafter, SAMPLES))
    repeated = again(walks=[chain_matched])
    assert counted == [0, 0, 0, 0]
    for name, records in repeated.items():
        np.testing.assert_array_equal(records.anchors, alone[name].anchors)
        np.testing.assert_array_equal(records.top_logprobs, alone[name].top_logprobs)


def test_a_sample_with_everything_known_loads_no_states(drafter: Drafter) -> None:
    whole = run(drafter, SAMPLES)

    def never() -> torch.Tensor:
        raise AssertionError

    known = [replace(s, load_states=never, load_known=lambda s=s: whole[s.sequence.sample_id]) for s in SAMPLES]  # type: ignore[misc]
    assert steps(run(drafter, known)) == steps(whole)


@pytest.mark.parametrize("stride", [1, 3])
def test_a_stride_adds_its_anchors_and_changes_no_walk(drafter: Drafter, stride: int) -> None:
    visited, found = run(drafter, SAMPLES), run(drafter, SAMPLES, stride=stride)
    for name, records in found.items():
        sequence = records.sequence
        wanted = set(range(sequence.prompt_length, sequence.end - 1, stride))
        assert set(records.anchors.tolist()) == wanted | set(visited[name].anchors.tolist())
    assert steps(found) == steps(visited)


def test_every_tail_is_answered_by_one_replay(drafter: Drafter) -> None:
    found = run(drafter, SAMPLES, every_tail=True)
    for tail in (ZLAB, DEEPSPEC):
        assert steps(found, tail) == steps(run(drafter, SAMPLES, tail=tail), tail)
    assert sample(0).sequence.end - 1 in found["s0"].anchors
    assert sample(2, completion=31, stopped=True).sequence.end - 1 not in found["s2"].anchors


def test_pypis_last_blocks_are_really_shorter(drafter: Drafter, tmp_path: Path) -> None:
    """Anchors within a block of the limit draft what a drafter of that block size drafts there, and nothing after it."""
    entry = replace(sample(0), limit=26)
    cut = run(drafter, [entry], tail=PYPI, stride=1, walks=[chain_matched])["s0"]
    whole = run(drafter, [entry], stride=1, walks=[chain_matched])["s0"]
    assert cut.anchors.tolist() == whole.anchors.tolist() == list(range(6, 25))
    assert [cut.drafted_slots(row) for row in range(-4, 0)] == [4, 3, 2, 1]
    np.testing.assert_array_equal(cut.top_ids[:-3], whole.top_ids[:-3])
    other = 0
    for row, anchor in ((-3, 22), (-2, 23), (-1, 24)):
        drafted, rows = cut.drafted_slots(row), 26 - anchor
        spec, weights = replace(SPEC, block_size=rows), random_drafter(tmp_path)[1]
        logits = expected_logits(spec, weights, entry, anchor)
        assert cut.drafted_ids[row, :drafted].tolist() == logits.argmax(-1).tolist()
        assert (cut.drafted_ids[row, drafted:] == UNKNOWN).all()
        assert (cut.true_rank[row, drafted:] == UNKNOWN).all()
        other += int((cut.top_ids[row, :drafted] != whole.top_ids[row, :drafted]).any())
    assert other  # the whole block would have drafted other candidates
    assert cut.near_ties is not None
    known = replace(entry, load_known=lambda: whole)
    counts: list[int] = []
    run(drafter, [known], tail=PYPI, stride=1, walks=[chain_matched], on_sample=lambda _records, n: counts.append(n))
    assert counts == [3]  # only the shortened blocks are not among the known ones
