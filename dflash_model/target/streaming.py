"""A target that is never loaded whole: layer by layer from the mapped files, for many samples at once, in bounded memory.

The decoder stands there without weights ("meta"). One pass over it with its layers stubbed tells what each layer is
called with (masks, rotary tables), so nothing here knows a layer's signature; then each layer is filled, run on every
sample and emptied. Same modules, same inputs: the same bits as a full load. Called as a whole the decoder works too, since
a layer fills itself when it is called (the exact checks use that), but then the files are read once a call.

Shapes: N tokens of one sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dflash_model.errors import InputError, StageError
from dflash_model.target.backbone import Backbone, skeleton
from dflash_model.target.hidden_states import CapturedStates, check_taps, first_of, forward_errors
from dflash_model.target.weight_files import WeightFiles, open_weights

GROUP_BYTES = 1 << 30
"""Hidden states held at once; more samples than fit go in groups, each of which reads the files once."""
HEAD_ROWS = 8192
"""Rows of the head that are converted at once where its stored dtype is another."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StreamedTarget:
    """A target whose layers are filled one at a time."""

    backbone: Backbone
    """Usable like a loaded one; each call of it reads every layer from the files."""

    layers: _Layers
    """Fills and empties the decoder layers."""


def open_streamed(directory: Path, *, dtype: str, device: str = "cpu") -> StreamedTarget:
    """The target in `directory` without its layers; embedding rows and head stay in the mapped files.

    Raises ConfigError for another dtype than bfloat16 or float32, InputError where the files are not stored as the model
    holds them (quantised weights) or the decoder needs more than its files hold, CheckpointError for damaged files.
    """
    backbone = skeleton(directory, dtype=dtype, device=device)
    files = open_weights(directory)
    files.check(backbone.decoder.state_dict())
    place = torch.device(device)
    _restore_buffers(backbone, place)
    _fill_ends(backbone, files, place)
    layers = _Layers(backbone, files, place)
    return StreamedTarget(backbone=backbone, layers=layers)


def extract_streamed(
    target: StreamedTarget, sequences: Sequence[Sequence[int]], tap_indices: Sequence[int], *, group_bytes: int = GROUP_BYTES
) -> Iterator[CapturedStates]:
    """What `hidden_states.extract` gives for each sequence, in order; layers are the outer loop of each group.

    Raises ConfigError for bad tap indices, InputError for tokens that the target cannot be given, StageError where a
    forward fails.
    """
    backbone = target.backbone
    check_taps(tap_indices, backbone.num_layers)
    for token_ids in sequences:
        backbone.check_tokens(token_ids)
    row_bytes = backbone.hidden_size * backbone.dtype.itemsize * (len(tap_indices) + 2)
    for group in _groups(sequences, group_bytes // row_bytes):
        yield from _extract_group(target, group, tap_indices)


def _groups(sequences: Sequence[Sequence[int]], most_rows: int) -> Iterator[list[Sequence[int]]]:
    """Consecutive sequences of at most `most_rows` tokens together; a longer one goes alone."""
    group: list[Sequence[int]] = []
    rows = 0
    for token_ids in sequences:
        if group and rows + len(token_ids) > most_rows:
            yield group
            group, rows = [], 0
        group.append(token_ids)
        rows += len(token_ids)
    if group:
        yield group


@dataclass(kw_only=True, slots=True)
class _Sample:
    """One sequence on its way through the layers."""

    states_1NH: torch.Tensor  # noqa: N815 - shape suffix
    """Output of the last layer that was run; at first the embedding's."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    """What each layer is called with beside the states."""

    taps: dict[int, torch.Tensor] = field(default_factory=dict)
    """Tap index -> [N, H] on the CPU."""


def _extract_group(
    target: StreamedTarget, group: Sequence[Sequence[int]], tap_indices: Sequence[int]
) -> Iterator[CapturedStates]:
    backbone = target.backbone
    with torch.no_grad(), forward_errors(backbone, sum(len(token_ids) for token_ids in group)):
        samples = [target.layers.record(token_ids) for token_ids in group]
        for sample in samples:
            if 0 in tap_indices:
                sample.taps[0] = _copy(sample.states_1NH)
        for k, layer in enumerate(backbone.layers, start=1):
            with target.layers.filled(k - 1):
                for sample in samples:
                    args, kwargs = sample.calls[k - 1]
                    sample.states_1NH = first_of(layer(sample.states_1NH, *args, **kwargs))
            if k in tap_indices:
                for sample in samples:
                    sample.taps[k] = _copy(sample.states_1NH)
    while samples:
        sample = samples.pop(0)
        final = sample.taps.get(backbone.num_layers)
        yield CapturedStates(
            taps={k: sample.taps[k] for k in tap_indices}, final=_copy(sample.states_1NH) if final is None else final
        )


def _copy(states_1NH: torch.Tensor) -> torch.Tensor:  # noqa: N803 - shape suffix
    return states_1NH[0].to("cpu", copy=True)


class _Layers:
    """The decoder layers, empty unless one is in use."""

    def __init__(self, backbone: Backbone, files: WeightFiles, device: torch.device) -> None:
        self._backbone, self._files, self._device = backbone, files, device
        self._empty = [dict(layer.state_dict()) for layer in backbone.layers]
        self._held: set[int] = set()
        self._recording = False
        for k, layer in enumerate(backbone.layers):
            layer.register_forward_pre_hook(lambda _module, _args, k=k: self._enter(k))
            layer.register_forward_hook(lambda _module, _args, _output, k=k: self._leave(k), always_call=True)

    @contextmanager
    def filled(self, k: int) -> Iterator[None]:
        """Layer `k` with its weights while the body runs, however often it is called."""
        self._fill(k)
        self._held.add(k)
        try:
            yield
        finally:
            self._held.discard(k)
            self._drop(k)

    def record(self, token_ids: Sequence[int]) -> _Sample:
        """The embedding of one sequence, and what each layer would be called with. No layer runs."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        inputs: list[torch.Tensor] = []

        def note(*args: Any, **kwargs: Any) -> torch.Tensor:
            states = args[0] if args else kwargs.pop("hidden_states")
            calls.append((args[1:], kwargs))
            inputs.append(states)
            passed_on: torch.Tensor = states
            return passed_on

        layers: list[Any] = list(self._backbone.layers)
        self._recording = True
        for layer in layers:
            layer.forward = note
        try:
            ids_1N = torch.tensor([list(token_ids)], device=self._device)  # noqa: N806 - shape suffix
            self._backbone.decoder(input_ids=ids_1N, use_cache=False)
        finally:
            self._recording = False
            for layer in layers:
                del layer.forward
        if len(calls) != len(layers) or any(states is not inputs[0] for states in inputs):
            raise StageError(
                "This target's decoder does not call its layers one after the other on each other's output.",
                "It cannot be read layer by layer; use extraction: full.",
            )
        return _Sample(states_1NH=inputs[0], calls=calls)

    def _enter(self, k: int) -> None:
        if k not in self._held and not self._recording:
            self._fill(k)

    def _leave(self, k: int) -> None:
        if k not in self._held and not self._recording:
            self._drop(k)

    def _fill(self, k: int) -> None:
        names = {name: f"layers.{k}.{name}" for name in self._empty[k]}
        read = self._files.read(names.values(), dtype=self._backbone.dtype, device=self._device)
        self._backbone.layers[k].load_state_dict({name: read[full] for name, full in names.items()}, assign=True)

    def _drop(self, k: int) -> None:
        self._backbone.layers[k].load_state_dict(self._empty[k], assign=True)


def _restore_buffers(backbone: Backbone, device: torch.device) -> None:
    """Make anew what no file holds: the rotary tables. Raises InputError for any other such buffer."""
    decoder = backbone.decoder
    saved = set(decoder.state_dict())
    unsaved = {name.rpartition(".")[0] for name, _ in decoder.named_buffers() if name not in saved}
    for name in sorted(unsaved):
        module = decoder.get_submodule(name)
        if "RotaryEmbedding" not in type(module).__name__:
            raise InputError(
                f"The target's {name} ({type(module).__name__}) holds values that are in no file; it cannot be read layer by layer.",
                "Use extraction: full.",
            )
        make: Any = type(module)
        decoder.set_submodule(name, make(backbone.model.config.get_text_config()).to(device))


def _fill_ends(backbone: Backbone, files: WeightFiles, device: torch.device) -> None:
    """Final norm in memory; embedding and head read from the mapped files, converted a few rows at a time."""
    norm = files.read([f"norm.{name}" for name in backbone.norm.state_dict()], dtype=backbone.dtype, device=device)
    backbone.norm.load_state_dict({name.removeprefix("norm."): tensor for name, tensor in norm.items()}, assign=True)
    embedding: Any = backbone.model.get_input_embeddings()
    stored = files.read(["embed_tokens.weight"], dtype=None, device=torch.device("cpu"))["embed_tokens.weight"]
    embedding.weight = nn.Parameter(stored, requires_grad=False)

    def rows(ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids.to(stored.device), stored).to(device=device, dtype=backbone.dtype)

    def logits(states: torch.Tensor) -> torch.Tensor:
        weight = files.read_head()
        if weight.dtype == states.dtype and states.device == weight.device:
            return functional.linear(states, weight)
        blocks = (weight[start : start + HEAD_ROWS] for start in range(0, len(weight), HEAD_ROWS))
        return torch.cat([functional.linear(states, block.to(device=states.device, dtype=states.dtype)) for block in blocks], -1)

    embedding.forward = rows
    head: Any = backbone.model.get_output_embeddings()
    head.forward = logits
