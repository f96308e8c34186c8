"""A target opened for extraction: loaded whole or read layer by layer, whichever there is room for.

Both give the same bits, so the choice is a fact of the host and never part of a key. Several sequences in one forward
(right-padded) may differ in the last bits, so their number is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from dflash_model.errors import ConfigError, InputError
from dflash_model.target.backbone import Backbone, check_device, load_backbone, parse_dtype
from dflash_model.target.hidden_states import CapturedStates, extract, extract_padded
from dflash_model.target.room import AUTO, FULL, STREAMING, Choice, choose_extraction, free_bytes_of
from dflash_model.target.streaming import StreamedTarget, extract_streamed, open_streamed
from dflash_model.target.weight_files import open_weights


@dataclass(kw_only=True, slots=True, eq=False)
class OpenTarget:
    """A target that hidden states can be had from."""

    backbone: Backbone
    """The model; of a streamed target, one that reads its layers whenever it is called."""

    choice: Choice
    """How it is read, and why."""

    streamed: StreamedTarget | None = None
    """Set where it is read layer by layer."""

    forwards: int = field(default=0)
    """Sequences that were put through so far."""

    def extract(
        self, sequences: Sequence[Sequence[int]], tap_indices: Sequence[int], *, batch: int = 1
    ) -> Iterator[CapturedStates]:
        """The states of each sequence, in order. `batch`: sequences in one padded forward (a whole load only).

        Raises what `hidden_states.extract` raises.
        """
        for captured in self._captured(sequences, tap_indices, batch):
            self.forwards += 1
            yield captured

    def _captured(self, sequences: Sequence[Sequence[int]], tap_indices: Sequence[int], batch: int) -> Iterator[CapturedStates]:
        if self.streamed is not None:
            yield from extract_streamed(self.streamed, sequences, tap_indices)
        elif batch == 1:
            yield from (extract(self.backbone, token_ids, tap_indices) for token_ids in sequences)
        else:
            rest = iter(sequences)
            while together := list(islice(rest, batch)):
                yield from extract_padded(self.backbone, together, tap_indices)


def open_target(
    directory: Path, *, dtype: str, device: str = "cpu", extraction: str = AUTO, max_gpu_gib: float | None = None
) -> OpenTarget:
    """Open the target in `directory` as there is room for it; `device` "auto" (several GPUs) is always whole.

    Raises HostBusy where a GPU has not enough free memory, ConfigError, InputError, CheckpointError, HostError and
    StageError as `load_backbone` and `open_streamed` do.
    """
    check_device(device)
    torch_dtype = parse_dtype(dtype)
    if device == "auto":
        if extraction == STREAMING:
            raise ConfigError("A target is read layer by layer onto one device, not onto several.", "Name one device.")
        choice = Choice(mode=FULL, reason="spread over this host's devices")
        return OpenTarget(backbone=load_backbone(directory, dtype=dtype, device=device), choice=choice)
    free = free_bytes_of(device)
    choice = choose_extraction(
        extraction, open_weights(directory), dtype=torch_dtype, device=device, free_bytes=free, max_gpu_gib=max_gpu_gib
    )
    if max_gpu_gib is not None and device != "cpu":
        _cap_gpu_memory(device, max_gpu_gib)
    if choice.mode == STREAMING:
        try:
            streamed = open_streamed(directory, dtype=dtype, device=device)
        except InputError as exc:
            if extraction == STREAMING or device != "cpu":
                raise
            # Memory is short, but the files allow no other way; mapped weights may still do, slowly.
            choice = Choice(mode=FULL, reason=f"{choice.reason}, too little; but {exc.problem}")
        else:
            return OpenTarget(backbone=streamed.backbone, choice=choice, streamed=streamed)
    return OpenTarget(backbone=load_backbone(directory, dtype=dtype, device=device), choice=choice)


def _cap_gpu_memory(device: str, gib: float) -> None:
    """Make torch itself refuse to take more, whatever the estimate said."""
    place = torch.device(device)
    total = torch.cuda.get_device_properties(place).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * (1 << 30) / total), place)
