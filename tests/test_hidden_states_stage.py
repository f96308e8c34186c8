"""The stage on a real target: streaming gives the same artifact, nothing is computed twice, a bad host keeps nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.artifacts import Manifest
from dflash_model.errors import ConfigError, InputError, NotEvaluable
from dflash_model.stages import hidden_states, identify_target, target_tables
from dflash_model.stages.protocol import Context, Request
from dflash_model.storage import artifacts_dir, find_artifact, read_json, writing_artifact
from dflash_model.target.extraction import OpenTarget, open_target
from dflash_model.target.greedy import generate_reference
from dflash_model.target.hidden_states import extract
from dflash_model.target.prompts import load_tokenizer, read_prompts, render
from dflash_model.target.references import Reference, write_references
from dflash_model.target.states_file import read_states, select_taps
from dflash_model.target.template_variants import prompt_variants
from tests.tiny_targets import DEMO_PROMPTS, DEMO_TARGET

TAPS = [2, 5]
SAMPLES = ("math-1", "math-2", "count-1", "story-1")


class Bench:
    """A work directory with the demo target's inputs, and the stage run in this process."""

    def __init__(self, work_dir: Path, references: Sequence[Reference]) -> None:
        self.work_dir = work_dir
        self.said: list[str] = []
        self.local: dict[str, Any] = {"target_path": str(DEMO_TARGET)}
        self._run(identify_target.run, "target", {}, {"path": str(DEMO_TARGET), "host": "h", "listing": []})
        self._run(target_tables.run, "tables", {"target": "target"}, {})
        self.references(references)

    def references(self, references: Sequence[Reference], key: str = "references") -> None:
        with writing_artifact(self.work_dir, kind="references", key=key) as writer:
            write_references(writer.path / "references.jsonl", references)
        self._references = key

    def states(self, key: str, *, taps: Sequence[int] = TAPS, local: dict[str, Any] | None = None, **parameters: Any) -> Manifest:
        inputs = {"target": "target", "tables": "tables", "references": self._references}
        chosen = {"taps": list(taps), "dtype": "float32"} | parameters
        return self._run(hidden_states.run, key, inputs, chosen, local or {})

    def parts(self) -> set[str]:
        return {path.name for path in artifacts_dir(self.work_dir).glob("states-*")}

    def rows(self, manifest: Manifest, sample: str, taps: Sequence[int] = TAPS) -> torch.Tensor:
        root = artifacts_dir(self.work_dir)
        return select_taps([read_states(root / key / "states.safetensors") for key in manifest.facts["samples"][sample]], taps)

    def _run(
        self, run: Callable[[Context], None], key: str, inputs: dict[str, str], parameters: dict[str, Any], local: Any = None
    ) -> Manifest:
        request = Request(
            stage="x", key=key, work_dir=self.work_dir, inputs=inputs, parameters=parameters, local=self.local | (local or {})
        )
        context = Context(request=request, kind=key, answer_descriptor=os.open(os.devnull, os.O_WRONLY))
        context.milestone = self.said.append  # type: ignore[method-assign]
        run(context)
        manifest = find_artifact(self.work_dir, key)
        assert manifest is not None
        return manifest


@pytest.fixture(scope="module")
def target() -> OpenTarget:
    return open_target(DEMO_TARGET, dtype="float32")


@pytest.fixture(scope="module")
def references(target: OpenTarget) -> list[Reference]:
    prompts = [prompt for prompt in read_prompts(DEMO_PROMPTS) if prompt.id in SAMPLES]
    rendered = render(prompts, load_tokenizer(DEMO_TARGET), thinking=None, max_prompt_tokens=100)
    limits = {"stop_ids": (2,), "max_new_tokens": 52, "overshoot_tokens": 0}
    return [generate_reference(target.backbone, prompt, **limits) for prompt in rendered]  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path, references: list[Reference]) -> Bench:
    return Bench(tmp_path, references)


def test_streaming_writes_the_same_artifact_as_a_full_load(bench: Bench, target: OpenTarget, references: list[Reference]) -> None:
    full = bench.states("full", local={"extraction": "full"})
    assert full.made_by["forwards"] == len(SAMPLES)
    assert full.made_by["extraction"].startswith("full: asked for; ")
    streamed = bench.states("streamed", local={"extraction": "streaming", "fresh": True})
    assert streamed.made_by["extraction"].startswith("streaming: asked for; ")
    assert (streamed.parts, streamed.facts) == (full.parts, full.facts)
    for reference in references:
        wanted = extract(target.backbone, reference.token_ids, TAPS)
        rows = bench.rows(streamed, reference.sample_id)
        assert torch.equal(rows, torch.cat([wanted.taps[tap] for tap in TAPS], dim=1))
        below = extract(target.backbone, reference.token_ids, [tap - 1 for tap in TAPS])
        assert not torch.equal(rows, torch.cat(list(below.taps.values()), dim=1))
    assert bench.said[-1].startswith("fidelity PASS, 4 forward passes")


def test_nothing_is_computed_twice_and_a_new_tap_costs_its_layer_only(
    bench: Bench, references: list[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.references(references[:3], "three")
    first = bench.states("first")
    assert first.made_by["forwards"] == 3
    # Another drafter: a subset of the taps, other thresholds, no load of the target at all.
    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "open_target", None)
        again = bench.states("again", taps=[5], thresholds={"hard_gap_nats": 0.0})
    assert (again.made_by["forwards"], again.made_by["extraction"]) == (0, None)
    assert set(again.parts) == set(first.parts)
    before = bench.parts()
    more = bench.states("more", taps=[2, 5, 7])
    assert more.made_by["forwards"] == 3
    assert {name.rpartition("-t")[2] for name in bench.parts() - before} == {"7"}
    bench.references(references, "four")
    assert bench.states("four-states").made_by["forwards"] == 1


def test_states_of_another_backend_are_not_taken_for_these(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretending(**changes: Any) -> Callable[..., dict[str, Any]]:
        return lambda *args: real(*args) | changes

    real = hidden_states.describe_backend
    first = bench.states("first")
    versions = first.facts["backend"]["versions"]
    monkeypatch.setattr(hidden_states, "describe_backend", pretending(versions=versions | {"safetensors": "99"}))
    assert bench.states("mover").made_by["forwards"] == 0
    others = (
        {"kernels": {"chunk_gated_delta_rule": "fla.ops"}},
        {"versions": versions | {"transformers": "99"}},
        {"device": "Some GPU"},
        {"attention": "eager"},
    )
    for number, changes in enumerate(others):
        monkeypatch.setattr(hidden_states, "describe_backend", pretending(**changes))
        other = bench.states(f"other-{number}")
        assert other.made_by["forwards"] == len(SAMPLES)
        assert not set(other.parts) & set(first.parts)
        assert other.facts["backend"] == first.facts["backend"] | changes
    monkeypatch.setattr(hidden_states, "describe_backend", real)
    batched = bench.states("batched", batch=3)
    assert batched.made_by["forwards"] == len(SAMPLES)
    assert torch.allclose(bench.rows(batched, "count-1"), bench.rows(first, "count-1"), rtol=1e-4, atol=1e-4)


def test_moved_lines_judge_kept_states_anew(bench: Bench) -> None:
    assert bench.states("usual").facts["fidelity"]["verdict"] == "PASS"
    strict = bench.states("strict", thresholds={"few_tokens": 10_000})
    assert (strict.facts["fidelity"]["verdict"], strict.made_by["forwards"]) == ("WARN", 0)
    content = read_json(artifacts_dir(bench.work_dir) / "strict" / "fidelity.json")
    assert content["thresholds"]["few_tokens"] == 10_000
    assert [check["passed"] for check in content["checks"]] == [True] * 5
    for wrong in ({"pass_agre": 0.5}, {"pass_agree": "much"}, {"pass_agree": -1}):
        with pytest.raises(ConfigError, match="fidelity threshold pass_agre"):
            bench.states("wrong", thresholds=wrong)


@contextmanager
def _broken(monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Any], None]) -> Iterator[None]:
    """The target as the stage opens it, with something wrong in it."""

    def opened(*args: Any, **kwargs: Any) -> OpenTarget:
        target = open_target(*args, **kwargs)
        break_it(target.backbone)
        return target

    with monkeypatch.context() as patch:
        patch.setattr(hidden_states, "open_target", opened)
        yield


def test_a_host_whose_exact_checks_fail_keeps_nothing_that_a_later_run_could_trust(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget_states(backbone: Any) -> None:
        for layer in backbone.layers:
            layer.register_forward_pre_hook(lambda _m, args, kwargs: (args, kwargs | {"cache": None}), with_kwargs=True)

    for _ in range(2):
        with _broken(monkeypatch, forget_states), pytest.raises(NotEvaluable, match="two chunks equal one pass") as caught:
            bench.states("bad")
        assert "state is lost between chunks" in caught.value.fix
        assert bench.parts() == set()


def test_zeroed_linear_attention_is_blamed_on_the_kernels_that_ran(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def zero(backbone: Any) -> None:
        for layer in backbone.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.register_forward_hook(lambda _module, _args, output: torch.zeros_like(output))

    with _broken(monkeypatch, zero), pytest.raises(NotEvaluable, match="tokens agree with the reference") as caught:
        bench.states("bad")
    assert "chunk_gated_delta_rule by torch" in caught.value.fix
    # What was kept says the same again, without the break: its figures go with it.
    with pytest.raises(NotEvaluable):
        bench.states("bad-again")


def test_completions_from_another_template_are_named(bench: Bench, target: OpenTarget, references: list[Reference]) -> None:
    tokenizer = load_tokenizer(DEMO_TARGET)
    wrong = []
    for reference in references:
        # The last variant leaves the template out altogether.
        bare = prompt_variants(reference.prompt_ids, tokenizer)[-1]
        assert tokenizer.decode(reference.prompt_ids).startswith("<|im_start|>user\n" + tokenizer.decode(bare))
        rendered = render(read_prompts(DEMO_PROMPTS)[:1], tokenizer, thinking=None, max_prompt_tokens=100)[0]
        prompt = replace(rendered, id=reference.sample_id, token_ids=bare)
        made = generate_reference(target.backbone, prompt, stop_ids=(1,), max_new_tokens=48, overshoot_tokens=0)
        wrong.append(replace(made, prompt_ids=reference.prompt_ids))
    bench.references(wrong, "wrong")
    with pytest.raises(NotEvaluable) as caught:
        bench.states("bad")
    assert "made from another rendering of the prompt" in caught.value.fix
    assert any(line.startswith("possible cause: other_prompt_template") for line in bench.said)


def _engine_files(
    directory: Path, target: OpenTarget, references: Sequence[Reference], taps: Sequence[int], *, change: Any = None
) -> Path:
    """A vLLM file a sample, in bfloat16, as if the engine had been started with `taps` as layer ids."""
    directory.mkdir()
    for number, reference in enumerate(references):
        states = extract(target.backbone, reference.token_ids, taps)
        stacked = torch.stack([states.taps[tap] for tap in taps], dim=1)
        if change:
            stacked = change(stacked)
        tensors = {"hidden_states": stacked.to(torch.bfloat16), "token_ids": torch.tensor(reference.token_ids)}
        save_file(tensors, directory / f"cmpl-{number}.safetensors")
    return directory


def _engine(directory: Path, ids: Sequence[int]) -> dict[str, Any]:
    return {
        "engine": "vllm",
        "path": str(directory),
        "layer_ids": list(ids),
        "listing": sorted(p.name for p in directory.iterdir()),
    }


def test_an_engines_states_cost_one_forward_and_are_kept_apart(
    bench: Bench, target: OpenTarget, references: list[Reference]
) -> None:
    files = _engine_files(bench.work_dir / "engine", target, references, [2, 5, 8])
    manifest = bench.states("engine", engine=_engine(files, [2, 5, 8]))
    assert manifest.made_by["forwards"] == 1
    assert manifest.facts["backend"]["engine"] == "vllm"
    assert (manifest.facts["fidelity"]["verdict"], manifest.facts["fidelity"]["n"]) == ("PASS", 4 * 52)
    checks = read_json(artifacts_dir(bench.work_dir) / "engine" / "fidelity.json")["checks"]
    assert [check["name"] for check in checks if check["name"].startswith("engine")] == ["engine states equal ours"]
    wanted = extract(target.backbone, references[0].token_ids, TAPS)
    rows = torch.cat([wanted.taps[tap] for tap in TAPS], dim=1).to(torch.bfloat16)
    assert torch.equal(bench.rows(manifest, references[0].sample_id), rows)
    assert bench.states("engine-again", taps=[5], engine=_engine(files, [2, 5, 8])).made_by["forwards"] == 0
    own = bench.states("own")
    assert own.made_by["forwards"] == len(SAMPLES)
    assert not set(own.parts) & set(manifest.parts)


def test_without_the_last_layer_the_gate_says_how_little_it_saw(
    bench: Bench, target: OpenTarget, references: list[Reference]
) -> None:
    files = _engine_files(bench.work_dir / "engine", target, references, TAPS)
    fidelity = bench.states("engine", engine=_engine(files, TAPS)).facts["fidelity"]
    assert fidelity["verdict"] == "WARN"
    assert "the engine did not deliver the last layer" in fidelity["reasons"][0]


def test_an_engines_wrong_states_are_refused_and_nothing_is_kept(
    bench: Bench, target: OpenTarget, references: list[Reference]
) -> None:
    noise = torch.Generator().manual_seed(0)

    def noisy(states: torch.Tensor) -> torch.Tensor:
        states[:, 0] += 0.1 * states[:, 0].std() * torch.randn(states[:, 0].shape, generator=noise)
        return states

    files = _engine_files(bench.work_dir / "noisy", target, references, [2, 5, 8], change=noisy)
    with pytest.raises(NotEvaluable, match=r"tap 2 is 0.*away") as caught:
        bench.states("bad", engine=_engine(files, [2, 5, 8]))
    assert "taps [2] are like none of ours" in caught.value.fix
    # z-lab ids given to an engine that counts from the embedding: said before anything runs, or found by comparing.
    files = _engine_files(bench.work_dir / "low", target, references, [1, 4, 8])
    with pytest.raises(InputError, match="one lower each"):
        bench.states("bad", engine=_engine(files, [1, 4, 8]))
    with pytest.raises(NotEvaluable) as caught:
        bench.states("bad", engine=_engine(files, [2, 5, 8]))
    assert "the engine gave taps [1, 4, 8], not [2, 5, 8]" in caught.value.fix
    assert bench.parts() == set()


def test_an_engines_swapped_samples_are_named_by_the_gate(bench: Bench, target: OpenTarget, references: list[Reference]) -> None:
    """Files of the right tokens with a neighbour's rows: the one prompt that is compared may be right, the gate sees all."""
    files = _engine_files(bench.work_dir / "engine", target, references, [2, 5, 8])
    by_length = sorted(references, key=lambda reference: len(reference.token_ids))
    longer, victim = by_length[-1], by_length[-2]
    states = extract(target.backbone, longer.token_ids, [2, 5, 8])
    stacked = torch.stack(list(states.taps.values()), dim=1)[: len(victim.token_ids)]
    number = references.index(victim)
    tensors = {"hidden_states": stacked.to(torch.bfloat16).contiguous(), "token_ids": torch.tensor(victim.token_ids)}
    save_file(tensors, files / f"cmpl-{number}.safetensors")
    with pytest.raises(NotEvaluable) as caught:
        bench.states("bad", engine=_engine(files, [2, 5, 8]))
    assert "Computed here once more, the same tokens agree" in caught.value.fix
    assert "rendering" not in caught.value.fix
    assert not any("other_prompt_template" in line for line in bench.said)
