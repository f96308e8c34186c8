"""The target's side of a step: one forward over a batch padded behind, hooks on the tapped layers and the last one.

Unlike evaluation, which never batches, rows share a forward here. Padding comes after a row's tokens and the target is
causal, so each row's states are those of the row alone; a test compares them with the evaluation's.

Shapes: B rows, N positions, T taps, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_model.errors import StageError
from dflash_model.target.backbone import Backbone
from dflash_model.target.hidden_states import check_taps
from dflash_model.training.faults import NO_FAULT, Fault


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TargetRows:
    """What the drafter is trained on."""

    states: Tensor
    """[B, N, T * H] at the taps, in order: fc's input."""

    final: Tensor
    """[B, N, H] raw output of the last layer: the verifier's logits come from it."""


class TargetForward:
    """A loaded target whose hooks stay on it; not for two threads at once."""

    def __init__(self, backbone: Backbone, tap_indices: tuple[int, ...], *, pad_id: int, fault: Fault = NO_FAULT) -> None:
        """Raises ConfigError for tap indices that the target does not have."""
        check_taps(tap_indices, backbone.num_layers)
        self._backbone, self._fault, self._pad_id = backbone, fault, pad_id
        taps = list(tap_indices)
        if fault.last_tap_is_verifiers:
            taps[-1] = backbone.num_layers
        self._taps = taps
        self._captured: dict[int, Tensor] = {}
        for k in sorted({*taps, backbone.num_layers}):
            self._hook(k)

    def _hook(self, k: int) -> None:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._captured[0] = args[0] if args else kwargs["hidden_states"]

        def after(_: Any, args: tuple[Any, ...], output: Any) -> None:
            self._captured[k] = output[0] if isinstance(output, tuple) else output

        if k == 0:
            self._backbone.layers[0].register_forward_pre_hook(before, with_kwargs=True)
        else:
            self._backbone.layers[k - 1].register_forward_hook(after)

    @property
    def device(self) -> torch.device:
        """Where the target lies."""
        return self._backbone.device

    def __call__(self, token_ids: Tensor, lengths: Tensor, *, noise: Tensor | None = None) -> TargetRows:
        """States of `token_ids` [B, N] whose rows have `lengths` [B] tokens.

        `noise` [B, N, T * H] in -1..1 times its scale: added to the taps in units of each tap's root mean square. Raises
        StageError where the forward fails.
        """
        token_ids = token_ids.to(self.device, non_blocking=True)
        lengths = lengths.to(self.device, non_blocking=True)
        where = self._places(token_ids, lengths)
        fed = token_ids if where is None else self._padded_in_front(token_ids, lengths)
        self._captured.clear()
        try:
            with torch.no_grad():
                # Without a cache transformers looks for packed rows in the position ids, and asks the device for the answer.
                self._backbone.decoder(input_ids=fed, use_cache=True)
        except RuntimeError as exc:
            raise StageError(
                f"The target's forward failed on {self.device} with {list(token_ids.shape)} tokens: {exc}.",
                "Out of memory: use a larger device, fewer batch.sequences or shorter batch.lengths.",
            ) from exc
        found = {k: rows if where is None else _gathered(rows, where) for k, rows in self._captured.items()}
        taps, final = [found[k] for k in self._taps], found[self._backbone.num_layers]
        if noise is None:
            return TargetRows(states=torch.cat(taps, dim=-1), final=final)
        pieces = noise.to(self.device, non_blocking=True).chunk(len(taps), dim=-1)
        noisy = [tap + piece * _root_mean_square(tap) for tap, piece in zip(taps, pieces, strict=True)]
        if self._fault.noise_on_verifier:
            final = final + pieces[-1] * _root_mean_square(final)
        return TargetRows(states=torch.cat(noisy, dim=-1), final=final)

    def _places(self, token_ids: Tensor, lengths: Tensor) -> Tensor | None:
        """[B, N] where each row's positions lie when padding comes in front (a bug); None when it comes behind."""
        if not self._fault.padded_in_front:
            return None
        width = token_ids.shape[1]
        return (torch.arange(width, device=self.device) + (width - lengths)[:, None]).clamp(max=width - 1)

    def _padded_in_front(self, token_ids: Tensor, lengths: Tensor) -> Tensor:
        width = token_ids.shape[1]
        source = torch.arange(width, device=self.device) - (width - lengths)[:, None]
        return torch.where(source >= 0, token_ids.gather(1, source.clamp(min=0)), self._pad_id)


def _gathered(rows: Tensor, where: Tensor) -> Tensor:
    return rows.gather(1, where[:, :, None].expand(-1, -1, rows.shape[-1]))


def _root_mean_square(rows: Tensor) -> Tensor:
    return rows.float().pow(2).mean().sqrt().to(rows.dtype)
