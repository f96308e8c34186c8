"""Policies: the attention mask of each draft layer, from z-lab's config keys, with the semantics of PyPI dflash.

There a sliding_attention layer is causal inside the block unless is_causal says otherwise. Configs on which the public
implementations disagree (a sliding layer whose window is switched off or not given) are refused, not guessed.
"""

from __future__ import annotations

from dflash_model.drafter.claims import Claim, Source, flag, read, settle, whole_number, wrong
from dflash_model.drafter.spec import MaskPolicy
from dflash_model.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
_KEYS = ("layer_types", "use_sliding_window", "is_causal", "causal", "use_swa", "sliding_window_non_causal")

LayerMasks = tuple[MaskPolicy, ...]


def whole_context(num_layers: int) -> LayerMasks:
    """Plain DFlash: every layer sees the whole context and the whole block."""
    return (MaskPolicy(in_block="bidirectional"),) * num_layers


def read_layer_masks(source: Source, *, num_layers: int) -> Claim[LayerMasks] | None:
    """One policy per draft layer; None where `source` says nothing about attention. Raises ConfigError."""
    if not any(source.claims(key) for key in _KEYS):
        return None
    types = read_layer_types(source, num_layers)
    causal = _causal_override(source)
    window = _window(source) if SLIDING in types.value else None
    if SLIDING not in types.value:
        _refuse_hidden_window(source)
    masks = tuple(
        MaskPolicy(
            in_block="causal" if (kind == SLIDING if causal is None else causal.value) else "bidirectional",
            window=window if kind == SLIDING else None,
        )
        for kind in types.value
    )
    _check_speculators_key(source, types.value, masks)
    return Claim(value=masks, place=types.place if causal is None else f"{types.place}, {causal.place}")


def read_layer_types(source: Source, num_layers: int) -> Claim[tuple[str, ...]]:
    """The attention type of each draft layer; all full where no layer_types are given. Raises ConfigError."""
    claims = source.top("layer_types")
    if not claims:
        for claim in source.top("use_sliding_window"):
            if flag(claim):
                raise ConfigError(
                    f"{claim.place} is true, but {source.label} has no layer_types.",
                    f"List one of {FULL}, {SLIDING} per draft layer as layer_types.",
                )
        return Claim(value=(FULL,) * num_layers, place=f"{source.label} (no layer_types: {FULL})")
    (claim,) = claims
    if not isinstance(claim.value, list | tuple) or any(kind not in (FULL, SLIDING) for kind in claim.value):
        raise wrong(claim, f"a list of {FULL} and {SLIDING}")
    if len(claim.value) != num_layers:
        raise ConfigError(
            f"{claim.place} lists {len(claim.value)} layers, but the weights hold {num_layers}.", "List one type per draft layer."
        )
    return Claim(value=tuple(claim.value), place=claim.place)


def _causal_override(source: Source) -> Claim[bool] | None:
    return read("causality", source.top("is_causal") + source.claims("causal"), flag)


def _window(source: Source) -> int:
    """The window of the sliding layers; use_sliding_window must be true, as Qwen3 configs drop the window without it."""
    fix = (
        'Write "use_sliding_window": true and the window as sliding_window if the drafter was trained with one; '
        f'otherwise call the layers {FULL} (and write "is_causal": true if the block was causal).'
    )
    switch = read("use_sliding_window", source.top("use_sliding_window"), flag)
    if switch is None or not switch.value:
        said = f"{switch.place} is false" if switch else f"{source.label} has no use_sliding_window"
        raise ConfigError(f"layer_types names {SLIDING}, but {said}: PyPI dflash then drops the window, engines keep it.", fix)
    window = read("window", source.top("sliding_window"), whole_number)
    if window is None or window.value < 1:
        raise ConfigError(f"layer_types names {SLIDING}, but {source.label} gives no sliding_window of at least 1.", fix)
    settle("window", [window, *(Claim(value=whole_number(c), place=c.place) for c in source.claims("swa_window_size"))])
    return window.value


def _refuse_hidden_window(source: Source) -> None:
    for claim in source.claims("use_swa"):
        if flag(claim):
            raise ConfigError(
                f"{claim.place} is true, but no entry of layer_types is {SLIDING}: engines disagree on what that means.",
                f"Name the layers that slide as {SLIDING} in layer_types.",
            )


def _check_speculators_key(source: Source, types: tuple[str, ...], masks: LayerMasks) -> None:
    for claim in source.top("sliding_window_non_causal"):
        expected = "bidirectional" if flag(claim) else "causal"
        for kind, mask in zip(types, masks, strict=True):
            if kind == SLIDING and mask.in_block != expected:
                raise ConfigError(
                    f"{claim.place} is {claim.value!r}, but the other keys make the sliding layers {mask.in_block}.",
                    f"Write is_causal ({str(not claim.value).lower()}) to settle it, or remove sliding_window_non_causal.",
                )
