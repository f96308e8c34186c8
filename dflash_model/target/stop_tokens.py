"""Which tokens end an answer, read from the target's files: the model itself need not be loaded to know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_model.errors import InputError
from dflash_model.target.model_directory import read_config, read_json_file, text_config

GENERATION_CONFIG = "generation_config.json"


def read_stop_ids(directory: Path, tokenizer: Any) -> tuple[int, ...]:
    """Union of what generation_config.json (where there is none: config.json) and the tokenizer call end of sequence, ascending.

    Raises InputError where there is none: every answer would run to the limit.
    """
    path = directory / GENERATION_CONFIG
    declared = (
        read_json_file(path).get("eos_token_id") if path.is_file() else text_config(read_config(directory)).get("eos_token_id")
    )
    ids = {*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id}
    stop_ids = tuple(sorted(int(token) for token in ids if token is not None))
    if not stop_ids:
        raise InputError(
            f"Neither {GENERATION_CONFIG} nor the tokenizer in {directory} names a stop token.",
            f"Set eos_token_id in the target's {GENERATION_CONFIG}.",
        )
    return stop_ids
