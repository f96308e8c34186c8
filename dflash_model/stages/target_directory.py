"""The target's directory on the host that runs a stage, checked to be the target that the run means."""

from __future__ import annotations

from pathlib import Path

from dflash_model.errors import InputError
from dflash_model.stages.protocol import Context
from dflash_model.target.fingerprint import fingerprint


def target_directory(context: Context) -> Path:
    """`local.target_path`, whose fingerprint must be that of the input `target`. Raises InputError where it is another."""
    directory = Path(context.local["target_path"])
    wanted = context.input_manifest("target").facts["fingerprint"]
    if fingerprint(directory).digest != wanted:
        raise InputError(
            f"{directory} is not the target that this run identified: its files have changed.",
            "Run again; the target is identified anew.",
        )
    return directory
