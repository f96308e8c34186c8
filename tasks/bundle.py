"""Bundles: a few prompts of a finished evaluation in one zip file that replays anywhere, the thing to attach to a bug report.

Inside: bundle.json; `artifacts/` with the drafters' weights and specs, the target's tables, the prompts' references and
hidden states; `records/<drafter>/` with what the evaluation recorded. The states and references are artifacts of their own,
cut to the prompts. With weights left out, their digests stay, and whoever replays gives the files.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_model.artifacts import Manifest
from dflash_model.digests import file_digest
from dflash_model.errors import InputError, StorageError, from_os_error
from dflash_model.replay.records import SampleRecords
from dflash_model.replay.walk import chain_matched, walk
from dflash_model.stages.protocol import Request
from dflash_model.storage import MANIFEST_NAME, artifacts_dir, find_artifact, read_manifest, write_json, writing_artifact
from dflash_model.target.references import read_references, write_references
from tasks.remote.inventory import LOCAL, RELAY, HostEntry
from tasks.remote.opening import open_host
from tasks.remote.site import Site
from tasks.remote.transfer import artifact_path

BUNDLE_VERSION = 1
BUNDLE_FILE = "bundle.json"
REFERENCES_KEY, STATES_KEY = "references", "states"
LOGPROB_TOLERANCE = 1e-3
"""Nats: other machines' arithmetic differs by far less, another drafter or other states by far more."""

WEIGHTS = ("model.safetensors", "tables.safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class BundledReplay:
    """One drafter's replay as the evaluation asked for it."""

    name: str
    """The drafter."""

    inputs: Mapping[str, str]
    """checkpoint, states, references, tables -> artifact key."""

    parameters: Mapping[str, Any]
    """Of the replay stage."""

    records: Sequence[str]
    """Keys of its shards' artifacts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One prompt of one drafter, then and now."""

    drafter: str
    """Name."""

    sample_id: str
    """The prompt's id."""

    fault: str | None
    """What differs; None: equal."""

    largest_nats: float
    """Largest difference of a log-probability of a true token."""


def pack(
    site: Site, replays: Sequence[BundledReplay], destination: Path, *, prompts: int, about: Mapping[str, Any], weights: bool
) -> list[str]:
    """Write the bundle of the first `prompts` prompts; returns their ids. `about`: facts for bundle.json. Raises EvalError."""
    part = destination.with_name(f"{destination.name}.part")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="bundle-", dir=destination.parent) as temporary:
            work = Path(temporary)
            ids = _gather(site, replays, work, prompts=prompts, weights=weights)
            write_json(work / BUNDLE_FILE, _contents(replays, ids, about, weights=weights))
            with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(p for p in work.rglob("*") if p.is_file()):
                    archive.write(path, path.relative_to(work).as_posix())
        part.replace(destination)
    except OSError as exc:
        raise from_os_error(exc, f"writing {destination}") from exc
    finally:
        part.unlink(missing_ok=True)
    return ids


def _contents(replays: Sequence[BundledReplay], ids: Sequence[str], about: Mapping[str, Any], *, weights: bool) -> dict[str, Any]:
    rows = [
        {
            "name": one.name,
            "inputs": {"checkpoint": one.inputs["checkpoint"], "tables": one.inputs["tables"]},
            "parameters": dict(one.parameters) | {"shard": [0, 1]},
        }
        for one in replays
    ]
    return {"format_version": BUNDLE_VERSION, "drafters": rows, "prompts": list(ids), "weights": weights, "about": dict(about)}


def _gather(site: Site, replays: Sequence[BundledReplay], work: Path, *, prompts: int, weights: bool) -> list[str]:
    first = replays[0].inputs
    references = read_references(_fetched(site, first["references"]) / "references.jsonl")[:prompts]
    ids = [reference.sample_id for reference in references]
    manifest = read_manifest(_fetched(site, first["references"]))
    with writing_artifact(work, kind="references", key=REFERENCES_KEY) as writer:
        write_references(writer.path / "references.jsonl", references)
        writer.facts |= {"count": len(ids), "of": manifest.digest}
    _states(site, first["states"], ids, work)
    for key in sorted({one.inputs[role] for one in replays for role in ("checkpoint", "tables")}):
        left_out = () if weights else WEIGHTS
        shutil.copytree(_fetched(site, key), artifacts_dir(work) / key, ignore=shutil.ignore_patterns(*left_out))
    for number, one in enumerate(replays):
        into = work / "records" / str(number)
        into.mkdir(parents=True)
        for key in one.records:
            for path in sorted((_fetched(site, key) / "records").glob("*.safetensors")):
                sample_id = SampleRecords.load(path).sequence.sample_id
                if sample_id in ids:
                    shutil.copyfile(path, into / f"{ids.index(sample_id):06d}.safetensors")
    return ids


def _states(site: Site, key: str, ids: Sequence[str], work: Path) -> None:
    """An artifact of these prompts' states alone; only their parts move."""
    found = site.find(key)
    if found is None:
        raise InputError(f"No reachable host holds {key}.", "Run `dflash-eval rerun` on this run first.")
    samples: dict[str, list[str]] = {sample_id: found.manifest.facts["samples"][sample_id] for sample_id in ids}
    for part in sorted({part for parts in samples.values() for part in parts}):
        shutil.copytree(_fetched(site, part), artifacts_dir(work) / part)
    with writing_artifact(work, kind="states", key=STATES_KEY) as writer:
        writer.parts |= {part: found.manifest.parts[part] for parts in samples.values() for part in parts}
        writer.facts |= dict(found.manifest.facts) | {"samples": samples}


def _fetched(site: Site, key: str) -> Path:
    """The artifact's directory on the relay, brought there if need be."""
    site.bring(key, RELAY)
    return Path(artifact_path(site.host(RELAY), key))


def replay_bundle(path: Path, directory: Path, *, threads: int, given: Sequence[Path] = ()) -> list[Difference]:
    """Unpack `path` below the empty `directory`, replay every drafter there, compare with what was recorded.

    `given`: files that the bundle leaves out, found by their digests. Raises InputError for a file that is no bundle.
    """
    contents = _unpack(path, directory)
    _complete(directory, [key for row in contents["drafters"] for key in row["inputs"].values()], given)
    host = open_host(
        HostEntry(name="bundle", via=LOCAL, work_dir=directory, roles=("eval",), threads=threads, slots=1, python=None)
    )
    differences = []
    for number, row in enumerate(contents["drafters"]):
        request = Request(
            stage="replay",
            key=f"again-{number}",
            work_dir=directory,
            inputs=row["inputs"] | {"states": STATES_KEY, "references": REFERENCES_KEY},
            parameters=row["parameters"],
            local={"fresh": True},
        )
        host.host.run_stage(request, log_path=directory / "replay.log", deadline_s=3600.0, on_event=lambda _event: None)
        now = artifacts_dir(directory) / request.key / "records"
        differences += [
            compare_records(row["name"], SampleRecords.load(then), SampleRecords.load(now / then.name))
            for then in sorted((directory / "records" / str(number)).glob("*.safetensors"))
        ]
    return differences


def _unpack(path: Path, directory: Path) -> dict[str, Any]:
    fix = "Give a file that `dflash-eval bundle` wrote."
    try:
        with zipfile.ZipFile(path) as archive:
            contents: dict[str, Any] = json.loads(archive.read(BUNDLE_FILE))
            if contents["format_version"] != BUNDLE_VERSION:
                raise InputError(
                    f"{path} is a bundle of version {contents['format_version']}, this program reads {BUNDLE_VERSION}.", fix
                )
            archive.extractall(directory)
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError) as exc:
        raise InputError(f"{path} is not a bundle: {exc}.", fix) from exc
    except OSError as exc:
        raise from_os_error(exc, f"unpacking {path}") from exc
    return contents


def _complete(directory: Path, keys: Sequence[str], given: Sequence[Path]) -> None:
    """Put the given files where artifacts lack them. Raises InputError for what is still missing, StorageError for damage."""
    digests = {file_digest(path): path for path in given}
    for key in sorted(set(keys)):
        manifest: Manifest = read_manifest(artifacts_dir(directory) / key)
        for entry in manifest.files:
            place = artifacts_dir(directory) / key / entry.name
            if place.exists():
                continue
            if entry.sha256 not in digests:
                raise InputError(
                    f"The bundle does not hold {key}/{entry.name} (sha256 {entry.sha256}, {entry.size_bytes} bytes).",
                    "Give that file with --file.",
                )
            shutil.copyfile(digests[entry.sha256], place)
        if find_artifact(directory, key) is None:
            raise StorageError(f"{key} in the bundle is damaged: its {MANIFEST_NAME} says another size.", "Bundle the run again.")


def compare_records(drafter: str, then: SampleRecords, now: SampleRecords) -> Difference:
    """Whether both say the same: anchors, drafted tokens, steps of the chain, and log-probabilities within LOGPROB_TOLERANCE."""
    fault, largest = None, 0.0
    if then.anchors.tolist() != now.anchors.tolist():
        fault = "other anchors were visited"
    elif walk(then, chain_matched).steps != walk(now, chain_matched).steps:
        fault = "the chain's steps differ"
    elif (changed := int(np.count_nonzero(then.drafted_ids != now.drafted_ids))) > 0:
        fault = f"{changed} drafted tokens differ"
    else:
        both = np.isfinite(then.true_logprob) & np.isfinite(now.true_logprob)
        largest = float(np.abs(then.true_logprob - now.true_logprob)[both].max(initial=0.0))
        if largest > LOGPROB_TOLERANCE or not np.array_equal(np.isfinite(then.true_logprob), np.isfinite(now.true_logprob)):
            fault = f"log-probabilities differ by up to {largest:.2g} nats"
    return Difference(drafter=drafter, sample_id=then.sequence.sample_id, fault=fault, largest_nats=largest)
