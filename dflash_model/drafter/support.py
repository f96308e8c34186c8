"""Support: which specs the backbone can run. What it cannot apply is refused by name, never left out silently."""

from __future__ import annotations

from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import ConfigError


def unsupported(spec: DrafterSpec) -> list[str]:
    """What the drafter needs and the backbone lacks, one phrase each; empty where it can be run."""
    needs = {
        "a candidate selector over a reduced vocabulary": spec.family == "dflash2" and spec.draft_vocab_size is not None,
        f"convolutions of groups of {spec.conv_group_size} channels, which do not divide hidden size {spec.hidden_size}": bool(
            spec.conv_group_size and spec.hidden_size % spec.conv_group_size
        ),
    }
    return [what for what, needed in needs.items() if needed]


def refuse_unsupported(spec: DrafterSpec, name: str) -> None:
    """Raise ConfigError listing what the drafter called `name` needs and the backbone lacks."""
    lacking = unsupported(spec)
    if lacking:
        raise ConfigError(
            f"{name} needs {', '.join(lacking)}, which cannot be run yet.",
            "Evaluate it with its own project's code; without these it would be another drafter.",
        )
