"""What a drafter owns besides its backbone: embedding, head, vocabulary map, mask embedding, candidate selector.

Each is there only where the spec says so; the target's tables stand in for the rest. Tensor names are the checkpoint's.

Shapes: B blocks, D drafted tokens, H hidden, V the target's vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_model.drafter.candidates import best_candidates
from dflash_model.drafter.selector import Candidates, CandidateSelector
from dflash_model.drafter.spec import DrafterSpec
from dflash_model.drafter.tables import DraftTables, target_ids_of
from dflash_model.errors import ConfigError


class TableOwner(nn.Module):
    """The part of a drafter that turns tokens into rows and hidden states into tokens."""

    def __init__(self, spec: DrafterSpec, *, name: str) -> None:
        """Weights are unset until a state dict is loaded. `name`: how errors call this drafter."""
        super().__init__()
        self.spec = spec
        self.name = name
        vocabulary = spec.vocab_size or 0
        head_rows = vocabulary if spec.draft_vocab_size is None else spec.draft_vocab_size
        self.embed_tokens = nn.Embedding(vocabulary, spec.hidden_size) if spec.owns_embedding else None
        self.lm_head = nn.Linear(spec.hidden_size, head_rows, bias=False) if spec.owns_head else None
        self.mask_embedding = nn.Parameter(torch.empty(spec.hidden_size)) if spec.mask_embedding else None
        self.candidate_selector: CandidateSelector | None = None
        if spec.selector_rank is not None:
            self.candidate_selector = CandidateSelector(spec.hidden_size, vocab_size=vocabulary, rank=spec.selector_rank)
        self.d2t: Tensor | None
        self.register_buffer("d2t", torch.zeros(spec.draft_vocab_size, dtype=torch.int64) if spec.draft_vocab_size else None)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which everything is computed."""
        return next(self.parameters()).dtype

    def tables(self, embedding: Tensor, head: Tensor) -> DraftTables:
        """The drafter's own tables where it has them, else the target's raw `embedding` [V, H] and `head` [V, H].

        Raises ConfigError where they do not fit the drafter, CheckpointError for a vocabulary map that is none.
        """
        spec = self.spec
        self._check_target_tables(embedding, head)
        own_rows = embedding if self.embed_tokens is None else self.embed_tokens.weight
        whose = "the target's" if self.embed_tokens is None else "its own"
        if self.mask_embedding is None and spec.mask_token_id >= len(own_rows):
            raise ConfigError(
                f"{self.name} has mask_token_id {spec.mask_token_id}, but {whose} embedding has {len(own_rows)} rows.",
                "Take the tables from the drafter's own target, or correct the mask id.",
            )
        known = min(len(embedding), len(head), len(own_rows))
        if self.candidate_selector is not None:
            known = min(known, len(self.candidate_selector.predecessor_codebook))
        ids = None if self.d2t is None else target_ids_of(self.d2t, vocab_size=len(head), name=self.name)
        return DraftTables(
            embedding=own_rows,
            mask_row=own_rows[spec.mask_token_id] if self.mask_embedding is None else self.mask_embedding,
            embedding_scale=spec.input_embedding_scale,
            block_size=spec.block_size,
            head=(head if self.lm_head is None else self.lm_head.weight).to(self.dtype),
            output_multiplier=spec.output_multiplier,
            softcap=spec.final_logit_softcapping,
            target_ids=ids,
            known_ids=known,
        )

    def _check_target_tables(self, embedding: Tensor, head: Tensor) -> None:
        for name, table in (("embedding", embedding), ("head", head)):
            if table.dim() != 2 or table.shape[1] != self.spec.hidden_size or len(table) < 2:
                raise ConfigError(
                    f"The target's {name} has shape {list(table.shape)}, but {self.name} has hidden size {self.spec.hidden_size}.",
                    "Drafter and target must belong together: take the tables from the drafter's own target.",
                )

    @torch.inference_mode()
    def propose(self, hidden_BDH: Tensor, anchor_ids: Tensor, tables: DraftTables) -> Tensor:  # noqa: N803
        """[B, D] target ids that a greedy block proposes, from `forward`'s result and the anchors' tokens [B]."""
        logits = tables.logits(hidden_BDH.flatten(0, 1))
        if self.candidate_selector is None:
            return tables.tokens_of(logits.argmax(dim=-1)).view(hidden_BDH.shape[:2])
        unary, ids = best_candidates(logits, self.spec.selector_top_k or 1)
        shape = (*hidden_BDH.shape[:2], -1)
        candidates = Candidates(ids=ids.view(shape), unary=unary.view(shape))
        return self.candidate_selector.chain(self.candidate_selector.project(hidden_BDH), anchor_ids, candidates)
