"""Vocabulary: whose ids the head speaks of, and how many. A reduced head without its map drafts other words silently."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_model.drafter.claims import Claim
from dflash_model.drafter.parts import EMBEDDING, HEAD, VOCABULARY_MAP, Parts
from dflash_model.errors import ConfigError

_SAME = "Take config, head and map from the same checkpoint."


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Both sizes, settled."""

    vocab_size: Claim[int] | None
    """Of the target; None where nothing tells it."""

    draft_vocab_size: Claim[int] | None
    """Of the head where it has a map of its own; None: the target's."""


def settle_vocabulary(parts: Parts, vocab_size: Claim[int] | None, draft_vocab_size: Claim[int] | None) -> Vocabulary:
    """Compare the sizes that configs state with those of the tensors. Raises ConfigError quoting two that differ."""
    target = vocab_size
    for rows, tensor in ((parts.embedding_rows, EMBEDDING), (parts.selector_rows, "candidate_selector's codebooks")):
        shown = Claim(value=rows, place=f"shape of {tensor}") if rows is not None else None
        target = _agreed(target, shown, "vocab_size")
    if parts.map_rows is not None:
        shown = Claim(value=parts.map_rows, place=f"shape of {VOCABULARY_MAP}")
        draft = _agreed(draft_vocab_size, shown, "draft_vocab_size")
        if draft is not None and target is not None and draft.value > target.value:
            raise ConfigError(f"{draft.place} is {draft.value}, but {target.place} is only {target.value}.", _SAME)
        return Vocabulary(vocab_size=target, draft_vocab_size=draft)
    if parts.head_rows is not None:
        shown = Claim(value=parts.head_rows, place=f"shape of {HEAD}")
        if target is not None and target.value != shown.value:
            raise ConfigError(
                f"{HEAD} has {shown.value} rows, but {target.place} is {target.value}, and the file holds no {VOCABULARY_MAP}.",
                f"A reduced vocabulary needs its map: save {VOCABULARY_MAP} (offsets, row i is the target's id i + d2t[i]) with the weights.",
            )
        target = target or shown
    if draft_vocab_size is not None and target is not None and draft_vocab_size.value != target.value:
        raise ConfigError(
            f"{draft_vocab_size.place} is {draft_vocab_size.value}, but {target.place} is {target.value}, "
            f"and the file holds no {HEAD} with a {VOCABULARY_MAP}.",
            "Save the reduced head and its map with the weights.",
        )
    return Vocabulary(vocab_size=target, draft_vocab_size=None)


def _agreed(stated: Claim[int] | None, shown: Claim[int] | None, setting: str) -> Claim[int] | None:
    if stated is not None and shown is not None and stated.value != shown.value:
        raise ConfigError(f"{stated.place} is {stated.value}, but the {shown.place} shows {setting} {shown.value}.", _SAME)
    return stated or shown
