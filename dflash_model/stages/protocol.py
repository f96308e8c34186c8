"""What a stage program is told and what it answers.

    python -m dflash_model.stages NAME REQUEST.json [--parent-pipe]

Request      {"protocol": 1, "stage", "key", "work_dir", "inputs": {name: artifact key}, "parameters": {...}, "local": {...}}
             `parameters` are part of the key; `local` (paths on this host, threads) is not and must not change the output.
Answer       descriptor 1: one JSON object a line, {"event": "progress"|"milestone"|"finished", ...}
             descriptor 2: the log
             error.json beside the request, {kind, problem, fix}, when it fails
Exit codes   0 done, the artifact's manifest is in place · 2 the input must change · 3 failed · 5 not evaluable ·
             70 a defect of this program · 130 ended on request (SIGTERM, or the parent went away)
--parent-pipe: standard input is a pipe held by the runner; when it closes, the whole process group ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dflash_model.artifacts import Manifest
from dflash_model.errors import InputError, StorageError
from dflash_model.storage import ArtifactWriter, artifacts_dir, find_artifact, read_json, writing_artifact

PROTOCOL_VERSION = 1
EXIT_DEFECT = 70
PROGRESS_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What one stage program shall do."""

    stage: str
    """Name in the registry."""

    key: str
    """Key of the artifact to make."""

    work_dir: Path
    """The host's work directory; artifacts lie below it."""

    inputs: dict[str, str]
    """Role -> artifact key; each must be in the work directory."""

    parameters: dict[str, Any]
    """Part of the key."""

    local: dict[str, Any]
    """Facts of this host; never part of the key."""

    @classmethod
    def read(cls, path: Path) -> Request:
        """Read REQUEST.json. Raises InputError."""
        data = read_json(path)
        try:
            if data["protocol"] != PROTOCOL_VERSION:
                raise InputError(
                    f"{path} speaks protocol {data['protocol']}, this program {PROTOCOL_VERSION}.",
                    "Use the same version of dflash-eval on both sides.",
                )
            return cls(
                stage=data["stage"],
                key=data["key"],
                work_dir=Path(data["work_dir"]),
                inputs=data["inputs"],
                parameters=data["parameters"],
                local=data.get("local", {}),
            )
        except (KeyError, TypeError) as exc:
            raise InputError(f"{path} is not a stage request: {exc} is missing.", "Write it as protocol.py says.") from exc

    def to_json(self) -> dict[str, Any]:
        """What `read` reads."""
        return {
            "protocol": PROTOCOL_VERSION,
            "stage": self.stage,
            "key": self.key,
            "work_dir": str(self.work_dir),
            "inputs": self.inputs,
            "parameters": self.parameters,
            "local": self.local,
        }


@dataclass(kw_only=True)
class Context:
    """What a stage's `run` gets: its request, its inputs, and the line to whoever waits."""

    request: Request
    """What to do."""

    kind: str
    """Kind of the artifact to make."""

    answer_descriptor: int
    """Where JSON lines go."""

    _last_progress: float = field(default=0.0)

    @property
    def parameters(self) -> dict[str, Any]:
        """Shorthand for `request.parameters`."""
        return self.request.parameters

    @property
    def local(self) -> dict[str, Any]:
        """Shorthand for `request.local`."""
        return self.request.local

    def input_path(self, role: str) -> Path:
        """Directory of an input artifact."""
        return artifacts_dir(self.request.work_dir) / self.request.inputs[role]

    def input_manifest(self, role: str) -> Manifest:
        """Manifest of an input. Raises StorageError where the artifact is not complete on this host."""
        key = self.request.inputs[role]
        manifest = find_artifact(self.request.work_dir, key)
        if manifest is None:
            raise StorageError(
                f"Input {role} ({key}) is not complete below {self.request.work_dir}.",
                "Run again; it will be made or moved anew.",
            )
        return manifest

    @contextmanager
    def writing(self) -> Iterator[ArtifactWriter]:
        """Write this stage's artifact; manifest and rename follow when the body ends."""
        with writing_artifact(self.request.work_dir, kind=self.kind, key=self.request.key) as writer:
            yield writer

    def say(self, event: str, **fields: Any) -> None:
        """One JSON line to whoever waits; a closed pipe is not an error, the parent watch ends us."""
        line = json.dumps({"event": event, "stage": self.request.stage, **fields}, ensure_ascii=False) + "\n"
        try:
            os.write(self.answer_descriptor, line.encode())
        except BrokenPipeError:
            return

    def milestone(self, message: str) -> None:
        """A sentence worth keeping in the run's log."""
        self.say("milestone", message=message)

    def progress(self, done: int, total: int, unit: str) -> None:
        """How far the work is; at most two lines a second, and always the last one."""
        now = time.monotonic()
        if done < total and now - self._last_progress < PROGRESS_INTERVAL_S:
            return
        self._last_progress = now
        self.say("progress", done=done, total=total, unit=unit)
