"""The whole replay against z-lab's own generation: 40 recorded acceptance-length lists, on a trained pair.

Several conventions move tau by a few percent only, so what must be exact is lists and drafted tokens, never "about".
"""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import transformers

from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.zlab import spec_from_zlab
from dflash_model.replay.engine import Sample, replay
from dflash_model.replay.records import SampleRecords, Sequence
from dflash_model.replay.walk import TRUNCATED, ZLAB, chain_matched, walk
from tests.naive_drafter import Weights, draft
from tests.tiny_drafters import PAIR, shapes_in

STOP_ID = 2


@dataclass(frozen=True)
class Pair:
    """The trained pair and the oracle's requests, with every layer's hidden states."""

    spec: DrafterSpec
    drafter: Drafter
    embedding: torch.Tensor
    head: torch.Tensor
    sequences: list[Sequence]
    token_ids: list[list[int]]
    hidden: list[tuple[torch.Tensor, ...]]
    lengths: list[list[int]]

    def samples(self, *, layer_offset: int = 0, moved: int = 0) -> list[Sample]:
        """The requests, with taps `layer_offset` layers off, or states `moved` positions late."""
        return [
            Sample(sequence=s, token_ids=ids, load_states=lambda i=i: self.states(i, layer_offset=layer_offset, moved=moved))  # type: ignore[misc]
            for i, (s, ids) in enumerate(zip(self.sequences, self.token_ids, strict=True))
        ]

    def states(self, request: int, *, layer_offset: int = 0, moved: int = 0) -> torch.Tensor:
        rows = torch.cat([self.hidden[request][index + layer_offset] for index in self.spec.tap_indices], dim=-1)
        return rows.roll(moved, dims=0)

    def replay(self, samples: list[Sample], drafter: Drafter | None = None, *, tail: str = ZLAB) -> list[SampleRecords]:
        found = replay(
            drafter or self.drafter, samples, embedding=self.embedding, head=self.head, walks=[chain_matched], top_k=8, tail=tail
        )
        return sorted(found, key=lambda records: int(records.sequence.sample_id))


@pytest.fixture(scope="module")
def pair() -> Pair:
    weights = PAIR / "drafter" / "model.safetensors"
    spec = spec_from_zlab(json.loads((PAIR / "drafter" / "config.json").read_text()), shapes_in(weights))
    target = transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    sequences, token_ids, hidden, lengths = [], [], [], []
    for number, request in enumerate(json.loads((PAIR / "oracle.json").read_text())["requests"]):
        prompt, completion = request["prompt_ids"], request["output_ids"]
        ids = prompt + completion
        with torch.inference_mode():
            out = target(torch.tensor([ids]), output_hidden_states=True)
            assert out.logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == completion
            hidden.append(tuple(layer[0] for layer in out.hidden_states))
            for _ in range(spec.drafted_tokens):
                ids = [*ids, int(target(torch.tensor([ids])).logits[0, -1].argmax())]
        sequences.append(
            Sequence(
                sample_id=str(number),
                prompt_length=len(prompt),
                completion_length=len(completion),
                overshoot_length=spec.drafted_tokens,
                stopped=completion[-1] == STOP_ID,
            )
        )
        token_ids.append(ids)
        lengths.append(request["acceptance_lengths"])
    return Pair(
        spec=spec,
        drafter=load_drafter(weights, spec),
        embedding=target.get_input_embeddings().weight.detach(),
        head=target.get_output_embeddings().weight.detach(),
        sequences=sequences,
        token_ids=token_ids,
        hidden=hidden,
        lengths=lengths,
    )


@pytest.fixture(scope="module")
def right(pair: Pair) -> list[SampleRecords]:
    return pair.replay(pair.samples())


def drafted(records: SampleRecords) -> np.ndarray:
    return records.top_ids[..., 0]


def test_all_forty_recorded_lists_are_reproduced(pair: Pair, right: list[SampleRecords]) -> None:
    assert len(pair.lengths) == 40
    assert [list(walk(records, chain_matched, tail=ZLAB).steps) for records in right] == pair.lengths
    assert {s.stopped for s in pair.sequences} == {True, False}
    tau = sum(map(sum, pair.lengths)) / sum(map(len, pair.lengths))
    assert 5 < tau < 7  # neither every draft accepted nor none: the lists say something


def test_the_truncated_tail_gives_other_lists_of_the_right_sum(pair: Pair) -> None:
    records = pair.replay(pair.samples(), tail=TRUNCATED)
    steps = [list(walk(found, chain_matched, tail=TRUNCATED).steps) for found in records]
    assert sum(a != b for a, b in zip(steps, pair.lengths, strict=True)) > 10
    assert [sum(found) for found in steps] == [s.completion_length - 1 for s in pair.sequences]


def test_drafted_tokens_equal_the_naive_reference_at_every_visited_anchor(pair: Pair, right: list[SampleRecords]) -> None:
    anchors = 0
    for request, records in enumerate(right):
        for row in range(0, len(records.anchors), 4):
            hidden = _naive(pair, request, int(records.anchors[row]))
            assert (hidden @ pair.head.T).argmax(-1).tolist() == drafted(records)[row].tolist()
            anchors += 1
    assert anchors > 150


def _naive(pair: Pair, request: int, anchor: int, **mistake: int) -> torch.Tensor:
    weights: Weights = dict(pair.drafter.state_dict())
    ids = torch.tensor([pair.token_ids[request][anchor]] + [pair.spec.mask_token_id] * (pair.spec.block_size - 1))
    return draft(weights, pair.spec, pair.states(request), pair.embedding[ids], anchor, **mistake)[1:]


def differing(a: list[SampleRecords], b: list[SampleRecords]) -> float:
    """Share of drafted tokens that differ, over the anchors that both visited."""
    same = total = 0
    for one, other in zip(a, b, strict=True):
        for row, anchor in enumerate(one.anchors.tolist()):
            found = other.row_of(anchor)
            if found is not None:
                same += int((drafted(one)[row] == drafted(other)[found]).sum())
                total += drafted(one)[row].size
    assert total > 200
    return 1 - same / total


@pytest.mark.parametrize("mistake", [{"layer_offset": -1}, {"layer_offset": 1}, {"moved": 1}])
def test_states_of_wrong_layers_or_positions_change_drafted_tokens(
    pair: Pair, right: list[SampleRecords], mistake: dict[str, int]
) -> None:
    wrong = pair.replay(pair.samples(**mistake))
    assert differing(right, wrong) > 0.02
    assert [list(walk(r, chain_matched, tail=ZLAB).steps) for r in wrong] != pair.lengths


def test_a_wrong_mask_id_changes_drafted_tokens(pair: Pair, right: list[SampleRecords]) -> None:
    wrong = load_drafter(PAIR / "drafter" / "model.safetensors", replace(pair.spec, mask_token_id=4))
    assert differing(right, pair.replay(pair.samples(), wrong)) > 0.1


def test_the_other_slot_layout_accepts_almost_nothing(pair: Pair) -> None:
    wrong = load_drafter(PAIR / "drafter" / "model.safetensors", replace(pair.spec, shift=1))
    records = pair.replay(pair.samples(), wrong, tail=TRUNCATED)
    assert np.mean([step for found in records for step in walk(found, chain_matched).steps]) < 1.5


@pytest.mark.parametrize("mistake", [{"context_change": 1}, {"context_change": -1}, {"position_change": 1}], ids=str)
def test_another_context_or_position_changes_drafted_tokens(
    pair: Pair, right: list[SampleRecords], mistake: dict[str, int]
) -> None:
    changed = total = 0
    for request, records in enumerate(right):
        for row in range(0, len(records.anchors), 6):
            wrong = (_naive(pair, request, int(records.anchors[row]), **mistake) @ pair.head.T).argmax(-1)
            changed += int((wrong.numpy() != drafted(records)[row]).sum())
            total += len(wrong)
    assert changed / total > 0.01
