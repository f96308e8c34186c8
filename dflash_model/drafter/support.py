"""Support: which specs the backbone can run. What it cannot apply is refused by name, never left out silently."""

from __future__ import annotations

from dflash_model.drafter.spec import DrafterSpec
from dflash_model.errors import ConfigError


def unsupported(spec: DrafterSpec) -> list[str]:
    """What the drafter needs and the backbone lacks, one phrase each; empty where it can be run."""
    rope = spec.rope
    needs = {
        "the DFlash2 family (convolutions and candidate selector)": spec.family != "dflash",
        f"RoPE of type {rope.type!r}": rope.type != "default",
        "interleaved RoPE": rope.interleaved,
        "an embedding of its own": spec.owns_embedding,
        "a head of its own": spec.owns_head,
        "a reduced vocabulary": spec.draft_vocab_size is not None,
        "a mask embedding": spec.mask_embedding,
        f"input_embedding_scale {spec.input_embedding_scale!r}": spec.input_embedding_scale != 1.0,
        f"output_multiplier {spec.output_multiplier!r}": spec.output_multiplier != 1.0,
        f"final_logit_softcapping {spec.final_logit_softcapping!r}": spec.final_logit_softcapping is not None,
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
