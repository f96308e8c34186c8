"""Tables of a drafter: what turns tokens into block rows, and final hidden states into logits of target tokens.

Each comes from the target or from the drafter's own checkpoint. A head over a reduced vocabulary has rows that are no
token ids: everything outside this module speaks of target ids.

Shapes: B blocks, S block rows, R rows, H hidden, V the target's vocabulary, C rows of the head (V, or Vd where reduced).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_model.errors import CheckpointError

NO_ROW = -2
"""In `DraftTables.rows_of`: the head has no row for that token, so the drafter can never propose it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftTables:
    """Embedding, head and vocabulary with which one drafter runs."""

    embedding: Tensor
    """[V, H] raw rows, of any float type."""

    mask_row: Tensor
    """[H] raw row of the unknown slots."""

    embedding_scale: float
    """Factor on every embedded row."""

    block_size: int
    """S."""

    head: Tensor
    """[C, H] in the type in which the drafter computes."""

    output_multiplier: float
    """Factor on the logits."""

    softcap: float | None
    """c: logits become c * tanh(logits / c), after the multiplier."""

    target_ids: Tensor | None
    """[C] int64, the token of each head row; None: row i is token i."""

    known_ids: int
    """Tokens 0..known_ids - 1 can stand in a block and in the target's text."""

    def blocks(self, anchor_ids: Tensor) -> Tensor:
        """Embedded blocks [B, S, H] of the anchors' tokens [B], in the type in which the drafter computes."""
        rows = torch.empty(
            len(anchor_ids), self.block_size, self.embedding.shape[1], dtype=self.head.dtype, device=self.head.device
        )
        rows[:, 0] = self.embedding[anchor_ids]
        rows[:, 1:] = self.mask_row
        return rows * self.embedding_scale if self.embedding_scale != 1.0 else rows

    def logits(self, rows: Tensor) -> Tensor:
        """[R, C] float32 of final hidden states [R, H]."""
        logits = (rows @ self.head.T).float()
        if self.output_multiplier != 1.0:
            logits = logits * self.output_multiplier
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def tokens_of(self, rows: Tensor) -> Tensor:
        """Target ids of head rows, any shape."""
        return rows if self.target_ids is None else self.target_ids[rows]

    def rows_of(self, tokens: Tensor) -> Tensor:
        """Head rows of target ids, any shape; NO_ROW where the head has none, and negative ids stay as they are."""
        if self.target_ids is None:
            return tokens.where(tokens < len(self.head), NO_ROW)
        # A reduced head's tokens ascend in no file's promise, so the map is turned round by a search in its sorted form.
        ordered, order = self.target_ids.sort()
        places = torch.searchsorted(ordered, tokens).clamp(max=len(ordered) - 1)
        return torch.where(tokens < 0, tokens, order[places].masked_fill(ordered[places] != tokens, NO_ROW))


def target_ids_of(d2t: Tensor, *, vocab_size: int | None, name: str) -> Tensor:
    """[Vd] int64 tokens of a reduced head's rows, from the offsets `d2t` [Vd] of the drafter called `name`.

    Raises CheckpointError where they are no map into the vocabulary, as when absolute ids are taken for offsets.
    """
    ids = torch.arange(len(d2t), device=d2t.device) + d2t.long()
    fix = "d2t holds offsets: row i speaks of token i + d2t[i]; make it anew if it holds the tokens themselves."
    twice = len(ids) - len(set(ids.tolist()))
    if twice:
        raise CheckpointError(f"d2t in {name} gives {twice} head rows a token that another has.", fix)
    if int(ids.min()) < 0 or (vocab_size is not None and int(ids.max()) >= vocab_size):
        wrong = int(((ids < 0) | (ids >= (vocab_size or torch.iinfo(ids.dtype).max))).int().argmax())
        limit = "0.." + ("" if vocab_size is None else str(vocab_size - 1))
        raise CheckpointError(f"d2t in {name} maps row {wrong} to token {int(ids[wrong])}, outside {limit}.", fix)
    return ids
