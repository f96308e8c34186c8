"""Published prompt sets as prompt lines, read with the package `datasets` (an extra) from the hub or from files of a directory.

A set is written to a file once and evaluated from there: night after night the same prompts, whatever the hub holds then.
Of MT-Bench only the first turn is used: the second would need the target's own answer to the first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_model.errors import ConfigError, InputError

Row = Mapping[str, Any]

_MATH = "{}\n\nThink step by step and give the final answer in \\boxed{{}}."
_COMPLETE = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{}\n```"
_WRITE = "{}\n\nWrite it in Python; these tests must pass:\n\n```python\n{}\n```"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """One published set."""

    hub_id: str
    """Dataset repository."""

    config: str | None
    """Its configuration, where it has several."""

    split: str
    """The split that is evaluated."""

    question: Callable[[Row], str]
    """What the user asks; KeyError where the row has other fields."""

    category: Callable[[Row], str | None] = lambda _row: None
    """The set's own label of a row."""


def _first_turn(row: Row) -> str:
    return str(row["prompt"][0] if "prompt" in row else row["turns"][0])


def _mbpp(row: Row) -> str:
    task = row["prompt"] if "prompt" in row else row["text"]
    return _WRITE.format(task, "\n".join(row["test_list"]))


SETS: dict[str, PromptSet] = {
    "gsm8k": PromptSet(
        hub_id="openai/gsm8k", config="main", split="test", question=lambda row: _MATH.format(row["question"].strip())
    ),
    "math500": PromptSet(
        hub_id="HuggingFaceH4/MATH-500",
        config=None,
        split="test",
        question=lambda row: _MATH.format(row["problem"].strip()),
        category=lambda row: row.get("subject"),
    ),
    "humaneval": PromptSet(
        hub_id="openai/openai_humaneval",
        config=None,
        split="test",
        question=lambda row: _COMPLETE.format(row["prompt"].strip("\n")),
    ),
    "mbpp": PromptSet(hub_id="google-research-datasets/mbpp", config="sanitized", split="test", question=_mbpp),
    "mt-bench": PromptSet(
        hub_id="HuggingFaceH4/mt_bench_prompts",
        config=None,
        split="train",
        question=_first_turn,
        category=lambda row: row.get("category"),
    ),
}


def prompt_lines(name: str, *, source: Path | None, revision: str | None, limit: int | None) -> list[str]:
    """The JSONL lines of a set: id `<name>-<row>`, category, one user message.

    `source`: a directory with the set's parquet or JSON files; None: the hub at `revision`. `limit` takes so many rows,
    evenly spaced, so that a set sorted by subject gives some of each. Raises ConfigError without the package, InputError.
    """
    chosen = SETS.get(name)
    if chosen is None:
        raise InputError(f"There is no prompt set {name!r}.", f"Sets: {', '.join(SETS)}.")
    rows = list(_rows(chosen, source, revision))
    taken = range(len(rows)) if limit is None or limit >= len(rows) else [i * len(rows) // limit for i in range(limit)]
    lines = []
    for number in taken:
        try:
            question, category = chosen.question(rows[number]), chosen.category(rows[number])
        except (KeyError, IndexError, TypeError, AttributeError) as exc:
            raise InputError(
                f"Row {number} of {source or chosen.hub_id} is no row of {name}: {type(exc).__name__} {exc}; it has "
                f"{', '.join(sorted(rows[number]))}.",
                "Give the files of that set, or another set's name.",
            ) from exc
        line = {"id": f"{name}-{number:04d}", "category": category or name, "messages": [{"role": "user", "content": question}]}
        lines.append(json.dumps(line, ensure_ascii=False))
    if not lines:
        raise InputError(f"{source or chosen.hub_id} holds no rows.", "Give the files of that set.")
    return lines


def _rows(chosen: PromptSet, source: Path | None, revision: str | None) -> Iterable[Row]:
    try:
        import datasets
    except ImportError as exc:
        raise ConfigError(
            "Prompt sets are read with the package `datasets`, which is not installed.",
            "pip install 'dflash-eval[datasets]', or give a JSONL file of your own.",
        ) from exc
    from httpx import HTTPError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        if source is not None:
            kind, files = _files(source)
            return list(datasets.load_dataset(kind, data_files=files, split="train"))
        return list(datasets.load_dataset(chosen.hub_id, chosen.config, split=chosen.split, revision=revision))
    except (OSError, ValueError, HTTPError, HfHubHTTPError, datasets.exceptions.DatasetsError) as exc:
        reason = (str(exc).strip() or type(exc).__name__).splitlines()[0].rstrip(".")
        if source is not None:
            raise InputError(f"The files in {source} cannot be read: {reason}.", "Copy the set's files there again.") from exc
        raise InputError(
            f"{chosen.hub_id} cannot be fetched from the hub: {reason}.",
            "Check the network and HF_TOKEN; or copy the set's files here and name their directory with --source.",
        ) from exc


def _files(source: Path) -> tuple[str, list[str]]:
    """(kind for `datasets`, files) of a directory: parquet, else JSON. Raises InputError where there are none."""
    for kind, endings in (("parquet", (".parquet",)), ("json", (".jsonl", ".json"))):
        found = sorted(str(path) for path in source.rglob("*") if path.suffix in endings and path.is_file())
        if found:
            return kind, found
    raise InputError(f"{source} holds no parquet or JSON files.", "Name the directory with the split's data files.")
