"""Tensor names as wrappers and trainers spell them, back to the names that a drafter's own file uses.

Wrappers nest in any order (`module._orig_mod.`, `_orig_mod.module.`). A leading prefix is stripped only where it is the
drafter's: every tensor has it, or most have it and the drafter's core is among them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dflash_model.errors import CheckpointError

WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Components that wrappers put anywhere in a name; no parameter is called so."""

LEADING_PREFIXES = ("module.", "draft_model.", "model.")
"""Prefixes that are stripped from the front only."""

SPELLINGS = {"context_proj": "fc", "context_norm": "hidden_norm"}
"""First component in TorchSpec's spelling -> in the z-lab layout."""

_CODEBOOK = re.compile(r"(candidate_selector\.(?:predecessor|successor)_codebook)\.weight")
"""speculators' spelling; z-lab's files have no `.weight` there."""

_CORE = re.compile(r"(^|\.)(fc|context_proj|layers\.\d+)\.")
VOCABULARY_MAP, VOCABULARY_MARKS = "d2t", "t2d"
REDUCED_HEAD = (VOCABULARY_MAP, VOCABULARY_MARKS, "lm_head.weight")
"""What a drafter with a vocabulary of its own cannot do without."""

_VOCAB = ("embed_tokens", "lm_head", "t2d", "d2t")
TARGETS_TABLE = "vocabulary table; the target's is used"
"""Why an embedding or a head is left out."""

_ROTARY = ("inv_freq", "original_inv_freq", "cos_cached", "sin_cached")


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanNames:
    """What became of every name."""

    clean: dict[str, str]
    """Name in the file -> clean name. Two may share one; whether that matters depends on what is kept."""

    prefixes: tuple[str, ...]
    """What was stripped, in order, each with its dot."""

    renamed: frozenset[str]
    """Names in the file whose spelling was changed beyond prefixes."""


def clean_names(names: list[str], file_name: str) -> CleanNames:
    """Strip wrappers and prefixes and translate spellings. Raises CheckpointError where nothing of a name would be left."""
    clean = {name: _unwrap(name) for name in names}
    prefixes = [f"{part}." for part in WRAPPER_PARTS if any(part in name.split(".") for name in names)]
    while (prefix := _common_prefix(list(clean.values()))) is not None:
        prefixes.append(prefix)
        clean = {name: short.removeprefix(prefix) for name, short in clean.items()}
    respelled = {name: _respell(short) for name, short in clean.items()}
    for name, short in respelled.items():
        if not short:
            raise CheckpointError(f"{file_name} holds a tensor called {name!r}, which is only a prefix.", "Save a state dict.")
    return CleanNames(
        clean=respelled, prefixes=tuple(prefixes), renamed=frozenset(name for name in names if respelled[name] != clean[name])
    )


def looks_like_drafter(names: list[str]) -> bool:
    """Whether some of the names are those of a drafter's core: fc (or its other spelling) or numbered layers."""
    return any(_CORE.search(name) for name in names)


def drop_reason(name: str, *, keep_vocab: bool) -> str | None:
    """Why a tensor of that clean name is not loaded into a drafter; None where it is."""
    parts = name.split(".")
    if parts[-1] in _ROTARY or "rotary_emb" in parts:
        return "rotary buffer, computed from the config"
    if parts[0].startswith("verifier_"):
        return "copy of a tensor of the target"
    if parts[0] in _VOCAB and not keep_vocab:
        return TARGETS_TABLE
    return None


def _unwrap(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPER_PARTS)


def _common_prefix(names: list[str]) -> str | None:
    """A leading prefix of all names, or of more than half of them with the drafter's core among those.

    Tensors that will be dropped do not vote: a verifier's copies may outnumber the drafter.
    """
    voters = [name for name in names if drop_reason(_bare(name), keep_vocab=False) is None] or names
    for prefix in LEADING_PREFIXES:
        carriers = [name for name in voters if name.startswith(prefix)]
        unanimous = bool(carriers) and len(carriers) == len(voters)
        if unanimous or (2 * len(carriers) > len(voters) and looks_like_drafter(carriers)):
            return prefix
    return None


def _bare(name: str) -> str:
    while prefix := next((prefix for prefix in LEADING_PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _respell(name: str) -> str:
    if codebook := _CODEBOOK.fullmatch(name):
        return codebook[1]
    first, dot, rest = name.partition(".")
    return SPELLINGS.get(first, first) + dot + rest
