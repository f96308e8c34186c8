"""A DFlash2, an own-head and a reduced-vocabulary drafter through the replay stage, against generation that really runs.

The reference generates speculatively with the target itself, one block at a time, nothing cached, and drafts with the
naive drafter. The drafters are the trained one of the bundled pair, changed so that it still drafts well.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.zlab import spec_from_zlab
from dflash_model.replay.records import NEVER, SampleRecords
from dflash_model.replay.walk import TRUNCATED, chain_matched, walk
from dflash_model.stages import replay
from dflash_model.stages.protocol import Context, Request
from dflash_model.storage import artifacts_dir, read_manifest, writing_artifact
from dflash_model.target.references import LENGTH, Reference, write_references
from dflash_model.target.states_file import SampleStates, write_states
from dflash_model.target.tables import TABLES_NAME, write_tables
from tests.naive_drafter import block_rows, draft, propose
from tests.tiny_drafters import PAIR, shapes_in

LIMIT = 20
REQUESTS = (0, 21, 38)
TAPS = (2, 4, 5)
Weights = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Form:
    """One drafter."""

    spec: DrafterSpec
    weights: Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Generated:
    """What speculative generation did on one request."""

    completion: tuple[int, ...]
    steps: tuple[int, ...]
    drafts: tuple[list[int], ...]


class Target:
    """The pair's target, run anew for every call."""

    def __init__(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
        self.embedding = self.model.get_input_embeddings().weight.detach()
        self.head = self.model.get_output_embeddings().weight.detach()
        requests = json.loads((PAIR / "oracle.json").read_text())["requests"]
        self.prompts = [tuple(requests[number]["prompt_ids"]) for number in REQUESTS]
        self.common = np.bincount([token for request in requests for token in request["output_ids"]], minlength=len(self.head))

    @torch.inference_mode()
    def run(self, ids: list[int]) -> tuple[list[int], Tensor]:
        """The token that follows each position, and the taps' states [N, T * H]."""
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0].argmax(-1).tolist(), torch.cat([out.hidden_states[tap][0] for tap in TAPS], dim=-1)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target()


def forms(target: Target) -> dict[str, Form]:
    weights = {name: tensor.float() for name, tensor in load_file(PAIR / "drafter" / "model.safetensors").items()}
    config = json.loads((PAIR / "drafter" / "config.json").read_text())
    spec = spec_from_zlab(config, shapes_in(PAIR / "drafter" / "model.safetensors"))
    noise = torch.Generator().manual_seed(3)

    def near(table: Tensor, share: float) -> Tensor:
        return table + torch.randn(table.shape, generator=noise) * table.std() * share

    vocabulary, hidden = target.head.shape
    kept = torch.from_numpy(np.argsort(-target.common, kind="stable")[:160].copy())
    kept = kept[torch.randperm(len(kept), generator=noise)[:144]].sort().values
    two = replace(
        spec, family="dflash2", conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=6
    )  # fmt: skip
    own: dict[str, Tensor] = {
        "candidate_selector.predecessor_codebook": torch.randn(vocabulary, 8, generator=noise),
        "candidate_selector.successor_codebook": torch.randn(vocabulary, 8, generator=noise),
        "candidate_selector.hidden_projection.weight": torch.randn(8, hidden, generator=noise) * 0.05,
    }
    for layer in range(spec.num_layers):
        for name in ("attention_conv", "mlp_conv"):
            base = torch.randn(2, 2, hidden, generator=noise) * 0.05
            base[:, 0] += 1.0
            own[f"layers.{layer}.{name}.base_kernel"] = base
            own[f"layers.{layer}.{name}.kernel_projection.weight"] = torch.randn(4 * hidden // 16, hidden, generator=noise) * 0.01
    return {
        "dflash2": Form(spec=two, weights=weights | own),
        "own embedding and head": Form(
            spec=replace(spec, owns_embedding=True, owns_head=True),
            weights=weights | {"embed_tokens.weight": near(target.embedding, 0.1), "lm_head.weight": near(target.head, 0.3)},
        ),
        "reduced vocabulary": Form(
            spec=replace(spec, owns_head=True, draft_vocab_size=len(kept)),
            weights=weights | {"lm_head.weight": target.head[kept].clone(), "d2t": kept - torch.arange(len(kept))},
        ),
    }


def generate(target: Target, form: Form, prompt: tuple[int, ...]) -> Generated:
    """Greedy speculative generation of LIMIT tokens; a step is cut at the limit."""
    ids = list(prompt)
    following, states = target.run(ids)
    ids.append(following[-1])
    end, steps, drafts = len(prompt) + LIMIT, [], []
    while len(ids) < end:
        anchor = len(ids) - 1
        block = block_rows(form.weights, form.spec, target.embedding, ids[-1])
        hidden = draft(form.weights, form.spec, states, block, anchor)
        drafted = propose(form.weights, form.spec, hidden, target.head, ids[-1])
        following, states = target.run([*ids, *drafted])
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == following[anchor + accepted]:
            accepted += 1
        earned = [*drafted[:accepted], following[anchor + accepted]][: end - len(ids)]
        ids += earned
        steps.append(len(earned))
        drafts.append(drafted)
    return Generated(completion=tuple(ids[len(prompt) :]), steps=tuple(steps), drafts=tuple(drafts))


def replayed(target: Target, form: Form, made: list[Generated], work_dir: Path) -> list[SampleRecords]:
    """The same requests through the stage program, from artifacts on disk."""
    with writing_artifact(work_dir, kind="checkpoint", key="checkpoint") as writer:
        save_file(form.weights, writer.path / "model.safetensors")
        writer.facts["spec"] = form.spec.to_json()
    with writing_artifact(work_dir, kind="tables", key="tables") as writer:
        writer.facts |= write_tables(PAIR / "target", writer.path)
        assert (writer.path / TABLES_NAME).exists()
    references = [
        Reference(
            sample_id=f"r{number}", prompt_ids=prompt, completion_ids=one.completion, overshoot_ids=(), finish=LENGTH,
            logprobs=None, engine="transformers",
        )
        for number, (prompt, one) in enumerate(zip(target.prompts, made, strict=True))
    ]  # fmt: skip
    with writing_artifact(work_dir, kind="references", key="references") as writer:
        write_references(writer.path / "references.jsonl", references)
    parts = {}
    for reference in references:
        _, states = target.run(list(reference.token_ids))
        with writing_artifact(work_dir, kind="states", key=f"states-{reference.sample_id}") as writer:
            whole = SampleStates(
                sample_id=reference.sample_id, token_ids=reference.token_ids, tap_indices=TAPS,
                hidden_states=states.view(len(states), len(TAPS), -1), target_digest="t",
                backend={},
            )  # fmt: skip
            write_states(writer.path / "states.safetensors", whole)
        parts[f"states-{reference.sample_id}"] = read_manifest(artifacts_dir(work_dir) / f"states-{reference.sample_id}").digest
    with writing_artifact(work_dir, kind="states", key="states") as writer:
        writer.parts |= parts
        writer.facts["samples"] = {reference.sample_id: [f"states-{reference.sample_id}"] for reference in references}
    chosen = {"shard": [0, 1], "tail": TRUNCATED, "streak_widths": [4], "tree_budgets": [8], "kept_candidates": 8}
    inputs = {name: name for name in ("checkpoint", "tables", "references", "states")}
    request = Request(stage="replay", key="replay", work_dir=work_dir, inputs=inputs, parameters=chosen, local={})
    replay.run(Context(request=request, kind="replay", answer_descriptor=os.open(os.devnull, os.O_WRONLY)))
    return [SampleRecords.load(path) for path in sorted((artifacts_dir(work_dir) / "replay" / "records").iterdir())]


@pytest.fixture(scope="module")
def results(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[Generated], list[SampleRecords]]]:
    found: dict[str, Any] = {}
    for name, form in forms(target).items():
        made = [generate(target, form, prompt) for prompt in target.prompts]
        found[name] = made, replayed(target, form, made, tmp_path_factory.mktemp("work"))
    return found


@pytest.mark.parametrize("name", ["dflash2", "own embedding and head", "reduced vocabulary"])
def test_the_replay_stage_equals_generation_step_by_step_and_draft_by_draft(name: str, results: Any) -> None:
    made, records = results[name]
    for one, found in zip(made, records, strict=True):
        walked = walk(found, chain_matched, tail=TRUNCATED)
        assert walked.steps == one.steps
        rows = [found.row_of(anchor) for anchor in walked.anchors]
        assert found.drafted_ids[rows].tolist() == list(one.drafts)
    assert max(step for one in made for step in one.steps) > 2
    assert min(step for one in made for step in one.steps) == 1


def test_the_selectors_chain_is_not_the_heads_favourites_and_ranks_follow_the_true_tokens(results: Any) -> None:
    _, records = results["dflash2"]
    differing = 0
    for found in records:
        assert found.conditional
        assert found.top_ids.shape[-1] == 6
        right = found.true_ids == found.drafted_ids
        reached = np.cumprod(np.concatenate([np.ones((len(right), 1)), right[:, :-1]], axis=1), axis=1).astype(bool)
        assert ((found.true_rank == 0) == right)[reached].all()
        differing += int(((found.true_rank == 0) != right)[~reached & (found.true_ids >= 0)].sum())
    assert differing > 0


def test_tokens_outside_the_reduced_vocabulary_are_met_and_end_each_match(results: Any) -> None:
    _, records = results["reduced vocabulary"]
    ranks = np.concatenate([found.true_rank.flatten() for found in records])
    assert (ranks == NEVER).any()
    for found in records:
        assert np.isneginf(found.true_logprob[found.true_rank == NEVER]).all()
        assert not np.isneginf(found.true_logprob[found.true_rank != NEVER]).any()


def test_the_forms_draft_differently(results: Any) -> None:
    assert len({str([one.drafts for one in made]) for made, _ in results.values()}) == 3
