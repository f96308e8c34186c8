"""What a prompt set says of its prompts beside their category: language and mode. Labels group results, they change no token."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_model.groups import LABELS
from dflash_model.target.prompts import read_prompts


def prompt_labels(path: Path) -> dict[str, dict[str, str]]:
    """ "language" and "mode" -> prompt's id -> label, of the JSONL file `path`; axes that no line names are left out.

    A label that is no string is left out too. Raises InputError as `read_prompts`.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    found: dict[str, dict[str, str]] = {}
    for prompt, line in zip(read_prompts(path), lines, strict=True):
        for axis in LABELS:
            if isinstance(line.get(axis), str):
                found.setdefault(axis, {})[prompt.id] = line[axis]
    return found
