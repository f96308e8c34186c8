"""Stage target-tables: embedding, head and final norm of the target as one small artifact. The model is not loaded."""

from __future__ import annotations

from dflash_model.stages.protocol import Context
from dflash_model.stages.target_directory import target_directory
from dflash_model.target.tables import write_tables


def run(context: Context) -> None:
    """Copy the three tensors."""
    directory = target_directory(context)
    with context.writing() as writer:
        writer.facts |= write_tables(directory, writer.path)
