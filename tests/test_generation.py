"""The replay against generation that really runs the target: a plain speculative loop, one rule for each tail.

The loop knows no record and no walk: it drafts with the naive reference, verifies with one forward pass of the target over
the whole text, and stops by the rule. Its text is the target's own greedy text, and its steps and drafts are the replay's.
"""

import functools
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers

from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.zlab import spec_from_zlab
from dflash_model.replay.engine import Sample, replay
from dflash_model.replay.records import Sequence
from dflash_model.replay.walk import DEEPSPEC, PYPI, TRUNCATED, ZLAB, chain_matched, walk
from dflash_model.target.model_directory import read_json_file
from dflash_model.target.prompts import load_tokenizer, read_prompts, render
from tests.naive_drafter import draft
from tests.tiny_drafters import shapes_in
from tests.tiny_targets import DEMO_PROMPTS, DEMO_TARGET

STOP_ID = 2
NAMES = ("step-00055", "step-00110", "step-00220")
REQUESTS = ((0, 12), (1, 19), (7, 17))
"""(prompt, most new tokens): the limits fall at different places of a block."""


@dataclass
class Generated:
    """What the loop did."""

    text: list[int]
    stopped: bool = False
    anchors: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)


class Target:
    """The demo's target, without any cache."""

    def __init__(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_TARGET, dtype=torch.float32).eval()
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.head = self.model.get_output_embeddings().weight.detach()

    @torch.inference_mode()
    def __call__(self, ids: list[int], taps: tuple[int, ...] = ()) -> tuple[list[int], torch.Tensor]:
        """(greedy token after each position, tap states side by side)."""
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        states = torch.cat([out.hidden_states[tap][0] for tap in taps], dim=-1) if taps else torch.empty(0)
        return out.logits[0].argmax(-1).tolist(), states


def generate(target: Target, drafter: Drafter, prompt: list[int], most: int, rule: str) -> Generated:
    """Speculative generation as the project of `rule` does it."""
    spec, weights = drafter.spec, dict(drafter.state_dict())
    limit, start = len(prompt) + most, len(prompt)
    following, states = target(prompt, spec.tap_indices)
    made = Generated(text=[*prompt, following[-1]])
    if following[-1] == STOP_ID and rule != ZLAB:
        made.stopped = True
    while not made.stopped and (start < limit if rule in (ZLAB, DEEPSPEC) else start + 1 < limit):
        rows = min(spec.block_size, limit - start) if rule == PYPI else spec.block_size
        ids = torch.tensor([made.text[start], *[spec.mask_token_id] * (rows - 1)])
        drafted = (draft(weights, spec, states, target.embedding[ids], start)[1:] @ target.head.T).argmax(-1).tolist()
        following, states = target([*made.text[: start + 1], *drafted], spec.tap_indices)
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == following[start + accepted]:
            accepted += 1
        new = [*drafted[:accepted], following[start + accepted]]
        if rule in (TRUNCATED, PYPI):
            new = new[: limit - start - 1]
        if STOP_ID in new:
            made.stopped = True
            stop = new.index(STOP_ID)
            if rule in (TRUNCATED, PYPI) or (rule == DEEPSPEC and stop < accepted):
                new = new[: stop + 1]
        made.anchors.append(start)
        made.steps.append(len(new))
        made.drafts.append(drafted)
        made.text = [*made.text[: start + 1], *new]
        start += len(new)
    return made


@pytest.fixture(scope="module")
def target() -> Target:
    return Target()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rendered = render(read_prompts(DEMO_PROMPTS), load_tokenizer(DEMO_TARGET), thinking=None, max_prompt_tokens=4000)
    return [list(prompt.token_ids) for prompt in rendered]


def drafter_of(name: str) -> Drafter:
    directory: Path = DEMO_TARGET.parent / "drafters" / name
    weights = directory / "model.safetensors"
    return load_drafter(weights, spec_from_zlab(read_json_file(directory / "config.json"), shapes_in(weights)))


@functools.cache
def greedy(target: Target, prompt: tuple[int, ...], most: int, beyond: int) -> tuple[list[int], int, bool]:
    """(tokens with `beyond` more past the end, the end, whether it stopped)."""
    ids, end = list(prompt), None
    while end is None or len(ids) < end + beyond:
        ids.append(target(ids)[0][-1])
        if end is None and (ids[-1] == STOP_ID or len(ids) == len(prompt) + most):
            end = len(ids)
    return ids, end, ids[end - 1] == STOP_ID


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_drafted_tokens_equal_a_loop_that_runs_the_target(name: str, target: Target, prompts: list[list[int]]) -> None:
    drafter = drafter_of(name)
    ended, shortened = set(), 0
    for number, most in REQUESTS:
        prompt = prompts[number]
        ids, end, stopped = greedy(target, tuple(prompt), most, drafter.spec.drafted_tokens)
        states = target(ids[:end], drafter.spec.tap_indices)[1]
        sequence = Sequence(
            sample_id=str(number), prompt_length=len(prompt), completion_length=end - len(prompt),
            overshoot_length=len(ids) - end, stopped=stopped,
        )  # fmt: skip
        sample = Sample(sequence=sequence, token_ids=ids, load_states=lambda s=states: s, limit=len(prompt) + most)  # type: ignore[misc]
        ended.add(stopped)
        for rule in (TRUNCATED, PYPI, ZLAB, DEEPSPEC):
            (records,) = replay(
                drafter, [sample], embedding=target.embedding, head=target.head, walks=[chain_matched], top_k=4, tail=rule
            )
            made, found = generate(target, drafter, prompt, most, rule), walk(records, chain_matched, tail=rule)
            assert (list(found.anchors), list(found.steps)) == (made.anchors, made.steps), rule
            assert made.text[:end] == ids[:end]
            for row, drafted in enumerate(made.drafts):
                assert records.drafted_slots(row) == len(drafted)
                assert records.drafted_ids[row, : len(drafted)].tolist() == drafted, rule
            shortened += sum(len(drafted) < drafter.spec.drafted_tokens for drafted in made.drafts)
    assert False in ended
    assert shortened > 0
