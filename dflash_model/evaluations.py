"""A finished evaluation, read back from its directory: what was judged, on what ground, with which numbers.

Two evaluations may be laid side by side only where they stand on the same `Ground`; `differences` says what is not the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from dflash_model.errors import InputError, from_os_error
from dflash_model.result import SCHEMA_VERSION
from dflash_model.totals import RequestTotals

RESULT_FILE, RUN_FILE = "result.json", "run.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What numbers stand on. Equal grounds: the same tokens of the same target, counted by the same rule."""

    target: str
    """Fingerprint of the target's files."""

    prompts: str
    """Digest of the prompt set."""

    template: str
    """Digest of chat template and thinking mode."""

    references: str
    """Digest of the greedy completions: they hold the length limit and the arithmetic of the target."""

    tail: str
    """How the last step of a request is counted."""

    fidelity: str
    """The gate's verdict on the hidden states; "-" where there was none."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Ground:
        """Of a result.json. Raises KeyError where it lacks a place."""
        prompts, fidelity = result["prompts"], result["fidelity"]
        return cls(
            target=str(result["target"]["fingerprint"]),
            prompts=str(prompts["digest"]),
            template=str(prompts["template_digest"]),
            references=str(prompts["references_digest"]),
            tail=str(result["tail"]),
            fidelity=str(fidelity["verdict"]) if fidelity is not None else "-",
        )

    def differences(self, other: Ground) -> list[str]:
        """One phrase a difference, such as "another target"; empty where numbers may be compared.

        Another target, prompt set or template makes other references too; then these are not named beside their cause.
        """
        ours, theirs = asdict(self), asdict(other)
        named = [f"another {_WORDS[key]}" for key in ("target", "prompts", "template") if ours[key] != theirs[key]]
        if not named and self.references != other.references:
            named.append("other references (length limit or arithmetic)")
        if self.tail != other.tail:
            named.append(f"tail rule {other.tail}, not {self.tail}")
        if self.fidelity != other.fidelity:
            named.append(f"fidelity {other.fidelity}, not {self.fidelity}")
        return named


_WORDS = {"target": "target", "prompts": "prompt set", "template": "chat template or thinking mode"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedDrafter:
    """One drafter of an evaluation."""

    name: str
    """As the evaluation's tables call it."""

    role: str
    """"candidate" or "reference"."""

    step: int | None
    """Training step, None where the checkpoint did not say."""

    digest: str
    """Of the checkpoint's content."""

    source: str | None
    """host:path of the checkpoint; None where the evaluation did not keep it."""

    tau: float | None
    """Pooled."""

    interval: tuple[float, float] | None
    """Of `tau`."""

    per_request: float | None
    """Mean of the requests' tau."""

    difference: float | None
    """Pooled, to the evaluation's reference."""

    verdict: str | None
    """Against the reference; None for the reference or without one."""

    @property
    def training_run(self) -> str | None:
        """host:directory that holds the checkpoint: the checkpoints of one directory are one training run."""
        if self.source is None:
            return None
        host, _, path = self.source.partition(":")
        return f"{host}:{PurePosixPath(path).parent}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What history keeps of one evaluation."""

    run_id: str
    """Name of its directory."""

    finished_at: str
    """ISO time in UTC; "" where it is not known."""

    headline: str
    """One sentence."""

    prompts: int
    """How many."""

    ground: Ground
    """What its numbers stand on."""

    drafters: tuple[EvaluatedDrafter, ...]
    """In the evaluation's order, the reference first."""

    def without(self, digest: str) -> Evaluation:
        """The same less one checkpoint."""
        return replace(self, drafters=tuple(drafter for drafter in self.drafters if drafter.digest != digest))


def read_result(directory: Path) -> dict[str, Any]:
    """result.json of a finished evaluation. Raises InputError where there is none, or none that can be read."""
    path = directory / RESULT_FILE
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise InputError(
            f"{directory} holds no finished evaluation.", "Name the directory of a run that has result.json."
        ) from exc
    except OSError as exc:
        raise from_os_error(exc, f"reading {path}") from exc
    except ValueError as exc:
        raise InputError(f"{path} is not JSON: {exc}.", _AGAIN) from exc
    if not isinstance(result, dict) or result.get("schema_version") not in range(1, SCHEMA_VERSION + 1):
        raise InputError(f"{path} has no schema_version that this version reads (1 to {SCHEMA_VERSION}).", _AGAIN)
    return result


_AGAIN = "`dflash-eval rerun` on that run writes it again from what is kept."


def read_evaluation(directory: Path) -> Evaluation:
    """What history keeps of the evaluation in `directory`. Raises InputError naming what is missing."""
    result, run = read_result(directory), read_run(directory)
    try:
        sources = run.get("sources") or [None] * len(result["drafters"])
        return Evaluation(
            run_id=directory.name,
            finished_at=str(run.get("finished_at") or ""),
            headline=str(result["headline"]),
            prompts=int(result["prompts"]["count"]),
            ground=Ground.of(result),
            drafters=tuple(_drafter(entry, source) for entry, source in zip(result["drafters"], sources, strict=True)),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise InputError(f"{directory / RESULT_FILE} lacks what history needs: {exc!r}.", _AGAIN) from exc


def request_totals(result: Mapping[str, Any], drafter: str | None = None) -> tuple[str, list[RequestTotals]]:
    """(name, rows) of one drafter of a result.json: steps and tokens of each request.

    `drafter` None: the only candidate, or where there is none the only drafter. Raises InputError that lists the names.
    """
    entries = {str(entry["name"]): entry for entry in result["drafters"]}
    candidates = [name for name, entry in entries.items() if entry["role"] == "candidate"] or list(entries)
    name = drafter if drafter is not None else candidates[0]
    if name not in entries or (drafter is None and len(candidates) > 1):
        problem = f"There is no drafter {drafter}" if drafter is not None else "There are several candidates"
        raise InputError(f"{problem} in that evaluation.", f"Name one as RUN:DRAFTER. Drafters: {', '.join(entries)}.")
    return name, [
        RequestTotals(
            sample_id=str(row["sample_id"]), category=row["category"], steps=int(row["steps"]), tokens=int(row["tokens"])
        )
        for row in entries[name]["requests"]
    ]


def read_run(directory: Path) -> dict[str, Any]:
    """run.json, {} where it is not there: a result without it still counts."""
    try:
        run = json.loads((directory / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) else {}


def _drafter(entry: Mapping[str, Any], source: Mapping[str, Any] | None) -> EvaluatedDrafter:
    tau, against = entry["tau"], entry["vs_reference"]
    return EvaluatedDrafter(
        name=str(entry["name"]),
        role=str(entry["role"]),
        step=entry["step"],
        digest=str(entry["digest"]),
        source=f"{source['host']}:{source['path']}" if source is not None else None,
        tau=tau["pooled"],
        interval=tuple(tau["interval"]) if tau["interval"] is not None else None,
        per_request=tau["per_request"],
        difference=against["difference"] if against is not None else None,
        verdict=str(against["verdict"]) if against is not None else None,
    )
