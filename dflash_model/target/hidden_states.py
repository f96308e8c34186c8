"""Hidden states of the target: one plain forward a sample, hooks on exactly the wanted layers.

Tap index k >= 1 is the output of 0-based decoder layer k - 1, index 0 the input of the first layer. The last index is
raw, before the final norm, unlike the last entry of transformers' `output_hidden_states`. One sequence a forward,
never padded, never packed: both are silent ways to wrong rows in linear-attention layers.

Shapes: N tokens, H hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflash_model.errors import ConfigError, StageError
from dflash_model.target.backbone import Backbone


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapturedStates:
    """What one forward left behind, on the CPU, in the backbone's dtype."""

    taps: dict[int, torch.Tensor]
    """Tap index -> [N, H], in the order asked for."""

    final: torch.Tensor
    """[N, H] raw output of the last layer, for the fidelity gate."""


def check_taps(tap_indices: Sequence[int], num_layers: int) -> None:
    """Raises ConfigError where tap indices are empty, doubled or outside of 0..num_layers."""
    wrong = [k for k in tap_indices if not 0 <= k <= num_layers]
    if not tap_indices or len(set(tap_indices)) != len(tap_indices) or wrong:
        raise ConfigError(
            f"The tap indices {list(tap_indices)} do not fit a target of {num_layers} layers.",
            f"Give distinct indices from 0 (embedding) to {num_layers} (last layer); a z-lab layer id i is tap index i + 1.",
        )


def extract(backbone: Backbone, token_ids: Sequence[int], tap_indices: Sequence[int]) -> CapturedStates:
    """Hidden states of `token_ids` at `tap_indices`, and the last layer's raw output. Row i is the state after token i.

    Raises ConfigError for bad tap indices, InputError for tokens that the target cannot be given, StageError where the
    forward fails or a layer was not captured.
    """
    check_taps(tap_indices, backbone.num_layers)
    last = backbone.num_layers
    with capturing(backbone, {*tap_indices, last}) as captured:
        run_forward(backbone, token_ids)
    states = _checked(captured, {*tap_indices, last}, expected=(len(token_ids), backbone.hidden_size))
    return CapturedStates(taps={k: states[k] for k in tap_indices}, final=states[last])


@contextmanager
def capturing(backbone: Backbone, tap_indices: set[int]) -> Iterator[dict[int, list[torch.Tensor]]]:
    """While open, each forward appends a CPU copy [N, H] of each wanted layer's output to the yielded dict's lists."""
    captured: dict[int, list[torch.Tensor]] = {k: [] for k in tap_indices}
    handles = [_hook(backbone, k, captured[k]) for k in tap_indices]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _hook(backbone: Backbone, k: int, into: list[torch.Tensor]) -> torch.utils.hooks.RemovableHandle:
    def keep(states: Any) -> None:
        # A layer may return its states alone or first in a tuple. The copy keeps no view of what later layers may change.
        states_1NH = states[0] if isinstance(states, tuple) else states  # noqa: N806 - shape suffix
        into.append(states_1NH.detach()[0].to("cpu", copy=True))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keep(args[0] if args else kwargs["hidden_states"])

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        keep(output)

    if k == 0:
        return backbone.layers[0].register_forward_pre_hook(before, with_kwargs=True)
    return backbone.layers[k - 1].register_forward_hook(after)


def run_forward(backbone: Backbone, token_ids: Sequence[int], **options: Any) -> Any:
    """One forward of the text decoder (no head, no cache) over one sequence; returns the decoder's output.

    Raises InputError for tokens that the target cannot be given, StageError where torch or a kernel fails.
    """
    backbone.check_tokens(token_ids)
    ids_1N = torch.tensor([list(token_ids)], device=backbone.device)  # noqa: N806 - shape suffix
    try:
        with torch.no_grad():
            return backbone.decoder(input_ids=ids_1N, **({"use_cache": False} | options))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as exc:
        raise StageError(
            f"The target's forward failed on {backbone.device} with {len(token_ids)} tokens: {type(exc).__name__}: {exc}.",
            "Out of memory: use a larger device. A kernel package without a GPU driver (fla on a CPU host): uninstall it there.",
        ) from exc


def _checked(captured: dict[int, list[torch.Tensor]], wanted: set[int], *, expected: tuple[int, int]) -> dict[int, torch.Tensor]:
    """Exactly one [N, H] tensor a layer, or StageError naming the tap."""
    for k in sorted(wanted):
        shapes = [tuple(states.shape) for states in captured[k]]
        if shapes != [expected]:
            raise StageError(
                f"Tap {k} gave tensors of shape {shapes}, expected one of {expected}.",
                "This target's decoder layers are not called once a forward; it cannot be tapped by hooks.",
            )
    return {k: captured[k][0] for k in wanted}
