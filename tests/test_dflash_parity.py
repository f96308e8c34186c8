"""Backbone and mask reading against PyPI dflash, where it is importable (`pip install --no-deps dflash==0.1.0`)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from dflash_model.drafter.backbone import Drafter, Group
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.zlab import spec_from_zlab
from dflash_model.replay.engine import Sample, replay
from dflash_model.replay.records import Sequence
from dflash_model.replay.walk import PYPI, chain_matched, walk
from tests.tiny_drafters import GEOMETRY, PAIR, SPEC, random_weights, shapes_in, zlab_config

public = pytest.importorskip("dflash.model", reason="PyPI dflash 0.1.0 is not installed")
pytestmark = pytest.mark.parity

FULL, SLIDING = "full_attention", "sliding_attention"
SLIDES = {"use_sliding_window": True, "max_window_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "full": {"layer_types": [FULL, FULL]},
    "sliding causal": SLIDES | {"layer_types": [SLIDING, SLIDING]},
    "sliding bidirectional": SLIDES | {"layer_types": [SLIDING, SLIDING], "is_causal": False},
    "mixed": SLIDES | {"layer_types": [SLIDING, FULL]},
    "causal everywhere": SLIDES | {"layer_types": [FULL, SLIDING], "is_causal": True},
}


def both(directory: Path, config: dict[str, Any]) -> tuple[Drafter, Any]:
    """Our drafter and the public one, with the same random weights."""
    weights = random_weights(SPEC)
    save_file(weights, directory / "model.safetensors")
    ours = load_drafter(directory / "model.safetensors", spec_from_zlab(config, GEOMETRY.tensor_shapes()))
    theirs = public.DFlashDraftModel(Qwen3Config(**config)).eval()
    theirs.load_state_dict(weights, strict=True)
    return ours, theirs


@pytest.mark.parametrize("window", [6, 64], ids=["window below context", "window above context"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_equal_the_public_forward(name: str, window: int, tmp_path: Path) -> None:
    config = zlab_config(**CONFIGS[name], sliding_window=window)
    ours, theirs = both(tmp_path, config)
    states, block = torch.randn(30, 72), torch.randn(3, 5, 24)
    context = ours.make_context(states)
    found = ours(block, [Group(context=context, anchors=(4, 21, 30))])
    for row, anchor in enumerate((4, 21, 30)):
        with torch.inference_mode():
            expected = theirs(
                position_ids=torch.arange(anchor + 5)[None],
                noise_embedding=block[row : row + 1],
                target_hidden=states[None, :anchor],
            )
        assert float((found[row] - expected[0, 1:]).abs().max()) < 1e-5


def test_the_configs_above_are_different_functions(tmp_path: Path) -> None:
    states, block = torch.randn(30, 72), torch.randn(1, 5, 24)
    outs = []
    for changes in CONFIGS.values():
        ours, _ = both(tmp_path, zlab_config(**changes, sliding_window=6))
        outs.append(ours(block, [Group(context=ours.make_context(states), anchors=(30,))]))
    for first in range(len(outs)):
        for second in range(first):
            assert float((outs[first] - outs[second]).abs().max()) > 1e-3


def test_the_public_forward_drafts_the_same_tokens_on_the_trained_pair() -> None:
    weights = PAIR / "drafter" / "model.safetensors"
    config = json.loads((PAIR / "drafter" / "config.json").read_text())
    ours = load_drafter(weights, spec_from_zlab(config, shapes_in(weights)))
    theirs = public.DFlashDraftModel(Qwen3Config(**config)).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    request = json.loads((PAIR / "oracle.json").read_text())["requests"][20]
    ids = torch.tensor([request["prompt_ids"] + request["output_ids"]])
    with torch.inference_mode():
        hidden = target(ids, output_hidden_states=True).hidden_states
        states = public.extract_context_feature(hidden, config["dflash_config"]["target_layer_ids"])
        context = ours.make_context(states[0])
        for anchor in range(len(request["prompt_ids"]), ids.shape[1], 7):
            block = target.get_input_embeddings()(torch.tensor([[int(ids[0, anchor])] + [3] * 7]))
            mine = target.lm_head(ours(block, [Group(context=context, anchors=(anchor,))]))
            expected = target.lm_head(
                theirs(position_ids=torch.arange(anchor + 8)[None], noise_embedding=block, target_hidden=states[:, :anchor])[
                    :, 1:
                ]
            )
            assert torch.equal(mine.argmax(-1), expected.argmax(-1))


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_the_pypi_tail_reproduces_the_public_generation_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 40 requests up to and including their ends: steps, and what every block drafted, those cut before the limit too.

    (Whole blocks there happen to draft the same first tokens on this pair; test_engine shows a drafter where they do not.)
    """
    monkeypatch.setattr(public, "_cuda_time", lambda: 0.0)
    weights = PAIR / "drafter" / "model.safetensors"
    config = json.loads((PAIR / "drafter" / "config.json").read_text())
    ours = load_drafter(weights, spec_from_zlab(config, shapes_in(weights)))
    theirs = public.DFlashDraftModel(Qwen3Config(**config)).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    target = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    samples, expected, drafted = [], {}, {}
    logits_of, blocks = theirs.compute_logits, []

    def noting(*arguments: Any) -> torch.Tensor:
        logits: torch.Tensor = logits_of(*arguments)
        blocks.append(logits.argmax(-1)[0].tolist())
        return logits

    monkeypatch.setattr(theirs, "compute_logits", noting)
    for number, request in enumerate(json.loads((PAIR / "oracle.json").read_text())["requests"]):
        prompt, completion = request["prompt_ids"], request["output_ids"]
        made = public.dflash_generate(
            theirs, target, torch.tensor([prompt]), request["max_new_tokens"], [2], return_stats=True
        )  # fmt: skip
        assert made.output_ids[0, len(prompt) :].tolist() == completion
        expected[str(number)], drafted[str(number)] = made.acceptance_lengths, list(blocks)
        blocks.clear()
        with torch.inference_mode():
            hidden = target(torch.tensor([prompt + completion]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[index][0] for index in ours.spec.tap_indices], dim=-1)
        sequence = Sequence(
            sample_id=str(number), prompt_length=len(prompt), completion_length=len(completion), overshoot_length=0,
            stopped=completion[-1] == 2,
        )  # fmt: skip
        limit = len(prompt) + request["max_new_tokens"]
        samples.append(
            Sample(sequence=sequence, token_ids=prompt + completion, load_states=lambda s=states: s, limit=limit)  # type: ignore[misc]
        )
    embedding, head = (table.weight.detach() for table in (target.get_input_embeddings(), target.get_output_embeddings()))
    found = list(replay(ours, samples, embedding=embedding, head=head, walks=[chain_matched], tail=PYPI))
    assert {r.sequence.sample_id: list(walk(r, chain_matched, tail=PYPI).steps) for r in found} == expected
    said = {
        r.sequence.sample_id: [r.drafted_ids[row, : r.drafted_slots(row)].tolist() for row in range(len(r.anchors))]
        for r in found
    }
    assert said == drafted
    lengths = {len(block) for blocks_of in drafted.values() for block in blocks_of}
    assert min(lengths) < max(lengths) == ours.spec.drafted_tokens
