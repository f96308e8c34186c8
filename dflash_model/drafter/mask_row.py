"""The mask row: what fills the unknown rows of a block. A row that training never touched, or an id that ends answers, still
drafts something, so neither is an error; both are said in the report.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from dflash_model.drafter.spec import DrafterSpec

SAMPLED_ROWS = 4096
NEAR_ZERO = 1e-3
"""Share of the median row norm below which a row counts as untouched."""


def mask_warnings(spec: DrafterSpec, mask_row: Tensor, embedding: Tensor, *, stop_ids: Iterable[int]) -> list[str]:
    """Warnings about the mask row [H] among the rows of `embedding` [V, H], and about ids that ended the target's answers."""
    warnings = []
    step = max(1, len(embedding) // SAMPLED_ROWS)
    usual = float(embedding[::step].float().norm(dim=-1).median())
    own = float(mask_row.float().norm())
    if own < NEAR_ZERO * usual:
        what = "mask_embedding" if spec.mask_embedding else f"The embedding row of mask_token_id {spec.mask_token_id}"
        warnings.append(
            f"{what} is nearly zero (norm {own:.3g}, the median row's is {usual:.3g}): check that the drafter was trained with it."
        )
    if not spec.mask_embedding and spec.mask_token_id in set(stop_ids):
        warnings.append(
            f"mask_token_id is {spec.mask_token_id}, a token that ends the target's answers: check that the drafter was trained so."
        )
    return warnings
