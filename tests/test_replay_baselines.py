"""The plain scripts of bench_replay.py are right: they give z-lab's own recorded lists, and each other's numbers."""

import json
from collections.abc import Callable

import pytest
import torch
import transformers
from safetensors.torch import load_file

from dflash_model.drafter.zlab import spec_from_zlab
from tests.benchmarks.replay_baselines import PlainDrafter, Request, cached, naive, walk_chain
from tests.tiny_drafters import PAIR, shapes_in

STOP_ID = 2
Recorded = list[tuple[Request, dict[str, int | bool], list[int]]]


@pytest.fixture(scope="module")
def pair() -> tuple[PlainDrafter, Recorded]:
    """The trained pair, and its recorded requests with the target's states and greedy tokens past their ends."""
    path = PAIR / "drafter" / "model.safetensors"
    spec = spec_from_zlab(json.loads((PAIR / "drafter" / "config.json").read_text()), shapes_in(path))
    target = transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    embedding, head = (table.weight.detach() for table in (target.get_input_embeddings(), target.get_output_embeddings()))
    drafter = PlainDrafter(
        spec, {name: w.float() for name, w in load_file(path).items()}, embedding=embedding, head=head, top_k=8
    )
    recorded: Recorded = []
    for entry in json.loads((PAIR / "oracle.json").read_text())["requests"]:
        first, ids = len(entry["prompt_ids"]), entry["prompt_ids"] + entry["output_ids"]
        end = len(ids)
        with torch.inference_mode():
            hidden = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            for _ in range(spec.drafted_tokens):
                ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        states = torch.cat([hidden[index][0] for index in spec.tap_indices], dim=-1)
        place: dict[str, int | bool] = {"first": first, "end": end, "stopped": ids[end - 1] == STOP_ID}
        recorded.append((Request(token_ids=torch.tensor(ids), states=states), place, entry["acceptance_lengths"]))
    return drafter, recorded


@pytest.mark.parametrize(("replayer", "every"), [(naive, 5), (cached, 1)])
def test_each_script_gives_the_recorded_lists(
    pair: tuple[PlainDrafter, Recorded], replayer: Callable[..., object], every: int
) -> None:
    drafter, recorded = pair
    assert len(recorded) == 40
    for request, place, lengths in recorded[::every]:
        assert walk_chain(replayer, drafter, request, **place) == lengths  # type: ignore[arg-type]


def test_both_scripts_say_the_same_of_one_anchor_and_another_context_would_not(pair: tuple[PlainDrafter, Recorded]) -> None:
    drafter, recorded = pair
    request, place, _ = recorded[20]
    anchors = list(range(int(place["first"]), int(place["end"]) - 1, 9))
    wrong = Request(token_ids=request.token_ids, states=request.states.roll(1, dims=0))
    different = 0
    for one, other, shifted in zip(
        naive(drafter, request, anchors), cached(drafter, request, anchors), cached(drafter, wrong, anchors), strict=True
    ):
        assert torch.equal(one.rank, other.rank)
        assert torch.equal(one.top_ids[:, 0], other.top_ids[:, 0])
        torch.testing.assert_close(one.top_logprobs, other.top_logprobs, atol=1e-4, rtol=0)
        different += int((one.top_ids[:, 0] != shifted.top_ids[:, 0]).sum())
    assert different > 5
