"""The oracle pair through the stage programs themselves: the 40 recorded lists again, from artifacts on disk."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dflash_model.artifacts import Manifest
from dflash_model.replay.records import SampleRecords
from dflash_model.replay.walk import TRUNCATED, ZLAB, chain_matched, walk
from dflash_model.storage import artifacts_dir, find_artifact, writing_artifact
from dflash_model.target.references import LENGTH, STOP, Reference, write_references
from tasks.remote.inventory import HostEntry, Inventory
from tasks.remote.site import Site, Work
from tests.tiny_drafters import PAIR

STOP_ID = 2
OVERSHOOT = 7


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((PAIR / "oracle.json").read_text())["requests"]
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, requests: list[dict[str, Any]]) -> Site:
    home = tmp_path_factory.mktemp("oracle")
    host = HostEntry(name="h", via="local", work_dir=home / "h", roles=("eval",), threads=1, slots=1, python=sys.executable)
    _write_references(home / "h", requests)
    return Site(Inventory(hosts=(host,)), home=home)


def _write_references(work_dir: Path, requests: list[dict[str, Any]]) -> None:
    """The oracle's own completions, and the target's greedy tokens past their ends."""
    target = transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    references = []
    for number, request in enumerate(requests):
        ids = [*request["prompt_ids"], *request["output_ids"]]
        with torch.inference_mode():
            for _ in range(OVERSHOOT):
                ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        finish = STOP if request["output_ids"][-1] == STOP_ID else LENGTH
        reference = Reference(
            sample_id=f"r{number:02d}",
            prompt_ids=tuple(request["prompt_ids"]),
            completion_ids=tuple(request["output_ids"]),
            overshoot_ids=tuple(ids[-OVERSHOOT:]),
            finish=finish,
            logprobs=None,
            engine="transformers",
        )
        references.append(reference)
    with writing_artifact(work_dir, kind="references", key="references") as writer:
        write_references(writer.path / "references.jsonl", references)


def make(site: Site, stage: str, inputs: dict[str, Manifest], parameters: dict[str, Any], local: dict[str, Any]) -> Manifest:
    refs = {role: (manifest.key, manifest.digest) for role, manifest in inputs.items()}
    host = site.host("h")
    work = Work(stage=stage, inputs=refs, parameters=parameters, local=local)
    from dflash_model.stages.protocol import Request

    request = Request(
        stage=stage,
        key=work.key,
        work_dir=Path(host.work_dir),
        inputs={role: key for role, (key, _) in refs.items()},
        parameters=parameters,
        local=local,
    )
    return host.run_stage(request, log_path=site.home / "log", deadline_s=120, on_event=lambda _e: None).manifest


@pytest.fixture(scope="module")
def ground(site: Site) -> dict[str, Manifest]:
    references = find_artifact(Path(site.host("h").work_dir), "references")
    assert references is not None
    target = make(site, "identify-target", {}, {"path": str(PAIR / "target"), "host": "h", "listing": []}, {})
    local = {"target_path": str(PAIR / "target")}
    tables = make(site, "target-tables", {"target": target}, {}, local)
    inputs = {"target": target, "references": references, "tables": tables}
    states = make(site, "hidden-states", inputs, {"taps": [2, 4, 5], "dtype": "float32"}, local)
    chosen = {"source_digest": "oracle", "form": "directory", "tokenizer_sha256": None}
    checkpoint = make(site, "extract-weights", {}, chosen, {"path": str(PAIR / "drafter")})
    return {"checkpoint": checkpoint, "states": states, "references": references, "tables": tables}


def steps(site: Site, ground: dict[str, Manifest], *, tail: str, shards: int) -> list[list[int]]:
    """The chain's step list of every request, in the oracle's order."""
    found: dict[str, list[int]] = {}
    for shard in range(shards):
        chosen = {"shard": [shard, shards], "tail": tail, "streak_widths": [], "tree_budgets": [], "kept_candidates": 8}
        manifest = make(site, "replay", ground, chosen, {})
        for path in sorted((artifacts_dir(Path(site.host("h").work_dir)) / manifest.key / "records").iterdir()):
            records = SampleRecords.load(path)
            found[records.sequence.sample_id] = list(walk(records, chain_matched, tail=tail).steps)
    return [found[name] for name in sorted(found)]


def test_all_forty_lists_come_out_of_the_stage_program(
    site: Site, ground: dict[str, Manifest], requests: list[dict[str, Any]]
) -> None:
    recorded = [request["acceptance_lengths"] for request in requests]
    assert len(recorded) == 40
    assert steps(site, ground, tail=ZLAB, shards=1) == recorded
    assert steps(site, ground, tail=ZLAB, shards=3) == recorded
    # The other tail rule is another list wherever the last step runs past the end.
    truncated = steps(site, ground, tail=TRUNCATED, shards=1)
    assert truncated != recorded
    assert [one[:-2] for one in truncated] == [one[: len(other) - 2] for one, other in zip(recorded, truncated, strict=True)]
