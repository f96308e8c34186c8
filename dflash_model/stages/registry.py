"""Which stage programs exist. Importing this imports no stage: the relay needs only names, kinds and versions.

A stage's version is part of its key. Raise it whenever the same inputs would give another output.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage program."""

    name: str
    """As on the command line of `python -m dflash_model.stages`."""

    version: int
    """Part of the key; raised when the output for given inputs changes."""

    kind: str
    """Kind of the artifact that it makes."""

    small: bool
    """True: the relay keeps a copy of the output. False: only its manifest and the list of holders."""

    @property
    def module(self) -> str:
        """The module whose `run(context)` does the work."""
        return f"dflash_model.stages.{self.name.replace('-', '_')}"


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(name="identify-target", version=1, kind="target", small=True),
        Stage(name="extract-weights", version=3, kind="checkpoint", small=False),
        Stage(name="target-tables", version=1, kind="tables", small=False),
        Stage(name="references", version=2, kind="references", small=True),
        Stage(name="hidden-states", version=2, kind="states", small=False),
        Stage(name="replay", version=4, kind="replay", small=True),
        Stage(name="compare", version=4, kind="comparison", small=True),
    )
}
