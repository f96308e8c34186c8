"""References: the target's greedy completions as token ids, made once and frozen. Drafters are judged against these.

A reference is written and read here, without torch; `greedy.py` makes one with transformers, `dflash_model.engines` asks a
serving engine. The completion ends with the stop token where there is one. `overshoot_ids` are the greedy tokens after its
end (after the stop token, too): the tail rule that counts the last verify step in full needs them.

Version 2 of the format added `served` and `token_source`; version 1 is still read, as made of token ids by an engine
without counters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_model.digests import json_digest, stage_key
from dflash_model.errors import StorageError, from_os_error
from dflash_model.served import Served
from dflash_model.storage import write_file

REFERENCES_VERSION = 2
KEY_VERSION = 1
"""Part of a sample's key: raised when the same inputs would give other tokens, not when the file's format changes."""

STOP = "stop"
LENGTH = "length"
IDS, TEXT = "ids", "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One prompt and what the target says to it, greedily."""

    sample_id: str
    """The prompt's id."""

    prompt_ids: tuple[int, ...]
    """The rendered prompt."""

    completion_ids: tuple[int, ...]
    """Generated tokens, the stop token included."""

    overshoot_ids: tuple[int, ...]
    """Greedy tokens past the completion's end, stop tokens ignored."""

    finish: str
    """"stop": the completion ends with a stop token. "length": it reached the limit."""

    logprobs: tuple[float, ...] | None
    """Natural log-probability of each completion token as its maker computed it; None where it does not tell."""

    engine: str
    """Who generated it: "transformers", "sglang", ..."""

    token_source: str = IDS
    """IDS: the maker told token ids. TEXT: it told text, which was tokenised here and decodes to the same text again."""

    served: Served | None = None
    """Counters of the serving engine's own drafter; None where it ran none or does not tell."""

    def __post_init__(self) -> None:
        """ValueError for values that no generation gives."""
        if not self.sample_id or not self.prompt_ids:
            raise ValueError("a sample id and a non-empty prompt are needed")
        if any(type(token) is not int or token < 0 for token in self.token_ids + self.overshoot_ids):
            raise ValueError("token ids must be whole numbers >= 0")
        if self.finish not in (STOP, LENGTH) or self.token_source not in (IDS, TEXT):
            raise ValueError(f"finish {self.finish!r}, token source {self.token_source!r}")
        if not self.completion_ids:
            raise ValueError("the completion is empty")
        if self.logprobs is not None:
            if len(self.logprobs) != len(self.completion_ids):
                raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.completion_ids)} completion tokens")
            if not all(math.isfinite(value) and value <= 0 for value in self.logprobs):
                raise ValueError("logprobs must be finite and <= 0")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and completion: the tokens whose hidden states are extracted."""
        return self.prompt_ids + self.completion_ids

    @property
    def token_digest(self) -> str:
        """sha256 over `token_ids`."""
        return json_digest(list(self.token_ids))

    @property
    def stopped(self) -> bool:
        """Whether the completion ends with a stop token."""
        return self.finish == STOP


def reference_key(
    prompt_ids: Sequence[int],
    target_digest: str,
    *,
    max_new_tokens: int,
    overshoot_tokens: int,
    stop_ids: Sequence[int],
    engine: str,
    dtype: str | None,
) -> str:
    """The name under which one sample's reference is cached: everything that decides its tokens, and not the prompt's id.

    `dtype` is None where a serving engine computes: it is the engine's own affair.
    """
    parameters = {
        "max_new_tokens": max_new_tokens,
        "overshoot_tokens": overshoot_tokens,
        "stop_ids": sorted(stop_ids),
        "engine": engine,
        "dtype": dtype,
    }
    inputs = {"target": target_digest, "prompt": json_digest(list(prompt_ids))}
    return stage_key("reference", KEY_VERSION, inputs, parameters)


def write_references(path: Path, references: Iterable[Reference]) -> None:
    """Write one JSON object a line, whole or not at all. Raises EvalError."""
    lines = [json.dumps(reference_to_json(reference), allow_nan=False) for reference in references]
    write_file(path, ("\n".join(lines) + "\n").encode())


def read_references(path: Path) -> list[Reference]:
    """Read and check what `write_references` wrote.

    Raises InputError where the file is missing, StorageError naming file and line where it is empty, of another version
    or damaged, or where a sample id is doubled.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as exc:
        raise from_os_error(exc, f"reading the references in {path}") from exc
    except UnicodeDecodeError as exc:
        raise StorageError(f"{path} is not UTF-8: {exc}.", "Delete it and run the references stage again.") from exc
    references: list[Reference] = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        try:
            reference = reference_from_json(json.loads(line))
            if reference.sample_id in seen:
                raise ValueError(f"sample {reference.sample_id!r} stands there twice")
        except (ValueError, KeyError, TypeError) as exc:
            raise StorageError(
                f"{path}:{number} is not a reference: {exc}.", "Delete it and run the references stage again."
            ) from exc
        seen.add(reference.sample_id)
        references.append(reference)
    return references


def reference_to_json(reference: Reference) -> dict[str, Any]:
    """One line of a references file."""
    return {"format_version": REFERENCES_VERSION} | asdict(reference)


def reference_from_json(data: Any) -> Reference:
    """Read what `reference_to_json` gave. Raises ValueError, KeyError or TypeError where it is not one."""
    fields = dict(data)
    version = fields.pop("format_version", None)
    if version not in (1, REFERENCES_VERSION):
        raise ValueError(f"format_version {version!r}, expected {REFERENCES_VERSION}")
    for name in ("prompt_ids", "completion_ids", "overshoot_ids"):
        if not isinstance(fields[name], list):
            raise TypeError(f"{name} is not a list")
        fields[name] = tuple(fields[name])
    if fields["logprobs"] is not None:
        fields["logprobs"] = tuple(float(value) for value in fields["logprobs"])
    if fields.get("served") is not None:
        fields["served"] = Served(**fields["served"])
    return Reference(**fields)
