"""Hidden states of the target: one plain forward a sample, hooks on exactly the wanted layers.

Tap index k >= 1 is the output of 0-based decoder layer k - 1, index 0 the input of the first layer. The last index is
raw, before the final norm, unlike the last entry of transformers' `output_hidden_states`. One sequence a forward, or
several padded on the right under a mask; never padded on the left and never packed: both are silent ways to wrong rows in
linear-attention layers.

Shapes: B sequences, N tokens, H hidden size, L layers.
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
    states = _checked(captured, {*tap_indices, last}, expected=[(len(token_ids), backbone.hidden_size)])
    return CapturedStates(taps={k: states[k][0] for k in tap_indices}, final=states[last][0])


def extract_padded(backbone: Backbone, sequences: Sequence[Sequence[int]], tap_indices: Sequence[int]) -> list[CapturedStates]:
    """`extract` for several sequences in one forward, padded on the right under a mask; the padding's rows are dropped.

    Later rows see earlier ones only, so padding behind a sequence changes none of its rows. Raises what `extract` raises.
    """
    check_taps(tap_indices, backbone.num_layers)
    for token_ids in sequences:
        backbone.check_tokens(token_ids)
    lengths = [len(token_ids) for token_ids in sequences]
    width, last = max(lengths), backbone.num_layers
    ids_BN = torch.zeros(len(sequences), width, dtype=torch.int64)  # noqa: N806 - shape suffix
    for row, token_ids in zip(ids_BN, sequences, strict=True):
        row[: len(token_ids)] = torch.tensor(list(token_ids))
    mask_BN = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()  # noqa: N806 - shape suffix
    hooks = capturing(backbone, {*tap_indices, last}, lengths=lengths)
    with hooks as captured, torch.no_grad(), forward_errors(backbone, sum(lengths)):
        backbone.decoder(input_ids=ids_BN.to(backbone.device), attention_mask=mask_BN.to(backbone.device), use_cache=False)
    states = _checked(captured, {*tap_indices, last}, expected=[(length, backbone.hidden_size) for length in lengths])
    return [CapturedStates(taps={k: states[k][b] for k in tap_indices}, final=states[last][b]) for b in range(len(sequences))]


@contextmanager
def capturing(
    backbone: Backbone, tap_indices: set[int], *, lengths: Sequence[int] = ()
) -> Iterator[dict[int, list[torch.Tensor]]]:
    """While open, each forward appends a CPU copy [N, H] of each wanted layer's output to the yielded dict's lists.

    `lengths`: of the sequences in one padded forward, which then appends one copy a sequence, without its padding.
    """
    captured: dict[int, list[torch.Tensor]] = {k: [] for k in tap_indices}
    handles = [_hook(backbone, k, captured[k], lengths) for k in tap_indices]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _hook(backbone: Backbone, k: int, into: list[torch.Tensor], lengths: Sequence[int]) -> torch.utils.hooks.RemovableHandle:
    def keep(output: Any) -> None:
        # The copies keep no view of what later layers may change.
        states_BNH = first_of(output).detach()  # noqa: N806 - shape suffix
        rows = [states_BNH[b, :length] for b, length in enumerate(lengths)] or [states_BNH[0]]
        into.extend(states.to("cpu", copy=True) for states in rows)

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
    with torch.no_grad(), forward_errors(backbone, len(token_ids)):
        return backbone.decoder(input_ids=ids_1N, **({"use_cache": False} | options))


def first_of(output: Any) -> torch.Tensor:
    """A layer's states [1, N, H]: it may return them alone or first in a tuple."""
    states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return states


@contextmanager
def forward_errors(backbone: Backbone, tokens: int) -> Iterator[None]:
    """What torch or a kernel raises in a forward over `tokens` tokens, as StageError."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as exc:
        raise StageError(
            f"The target's forward failed on {backbone.device} with {tokens} tokens: {type(exc).__name__}: {exc}.",
            "Out of memory: use a larger device. A kernel package without a GPU driver (fla on a CPU host): uninstall it there.",
        ) from exc


def _checked(
    captured: dict[int, list[torch.Tensor]], wanted: set[int], *, expected: list[tuple[int, int]]
) -> dict[int, list[torch.Tensor]]:
    """Exactly one [N, H] tensor a layer and sequence, or StageError naming the tap."""
    for k in sorted(wanted):
        shapes = [tuple(states.shape) for states in captured[k]]
        if shapes != expected:
            raise StageError(
                f"Tap {k} gave tensors of shape {shapes}, expected {expected}.",
                "This target's decoder layers are not called once a forward; it cannot be tapped by hooks.",
            )
    return {k: captured[k] for k in wanted}
