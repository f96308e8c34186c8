"""Batches: which sequences a step sees, as tensors of a few fixed shapes. Step and seed decide it, and nothing else does.

Sequences are bucketed by length and padded behind, never in front: the target is causal, so what follows a row cannot
change it. A bucket's last batch is filled up from its own first sequences.

Shapes: B rows, N positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_model.errors import ConfigError
from dflash_model.target.references import Reference

ORDER, ANCHORS, NOISE, WEIGHTS = range(4)
"""Streams of randomness: one never shifts another."""


def generator_of(seed: int, stream: int, number: int) -> torch.Generator:
    """A CPU generator for step or epoch `number` of one stream; the same for the same arguments."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) * 16 + stream)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One step's rows."""

    step: int
    """The step they belong to, from 0."""

    token_ids: Tensor
    """[B, N] int64, padded behind."""

    lengths: Tensor
    """[B] int64."""

    supervised: Tensor
    """[B, N] bool: positions of the answer."""

    documents: Tensor
    """[B, N] int64: 0 in the sequence, -1 in the padding."""

    tokens: int
    """Real tokens in all rows."""


class BatchPlan:
    """The batches of a run, in order."""

    def __init__(
        self, references: Sequence[Reference], *, lengths: Sequence[int], sequences: int, seed: int, pad_id: int
    ) -> None:
        """Raises ConfigError where a sequence is longer than the largest of `lengths`, or there is none."""
        self._references, self._rows, self._seed, self._pad_id = references, sequences, seed, pad_id
        self._buckets: dict[int, list[int]] = {}
        for index, reference in enumerate(references):
            size = len(reference.token_ids)
            fitting = [length for length in lengths if length >= size]
            if not fitting:
                raise ConfigError(
                    f"Sequence {reference.sample_id} has {size} tokens, more than batch.lengths' largest, {max(lengths)}.",
                    "Add a larger length.",
                )
            self._buckets.setdefault(fitting[0], []).append(index)
        if not references:
            raise ConfigError("There is no sequence to train on.", "Give a references file with at least one line.")
        self.per_epoch = sum(-(-len(members) // sequences) for members in self._buckets.values())
        self._epoch: tuple[int, list[tuple[int, list[int]]]] = (-1, [])

    def batch(self, step: int) -> Batch:
        """The rows of `step`."""
        length, members = self.members(step)
        token_ids = torch.full((len(members), length), self._pad_id)
        supervised = torch.zeros(token_ids.shape, dtype=torch.bool)
        sizes = [len(self._references[index].token_ids) for index in members]
        for row, index in enumerate(members):
            reference = self._references[index]
            token_ids[row, : sizes[row]] = torch.tensor(reference.token_ids)
            supervised[row, len(reference.prompt_ids) : sizes[row]] = True
        lengths = torch.tensor(sizes)
        documents = torch.where(torch.arange(length) < lengths[:, None], 0, -1)
        return Batch(
            step=step, token_ids=token_ids, lengths=lengths, supervised=supervised, documents=documents, tokens=sum(sizes)
        )

    def members(self, step: int) -> tuple[int, list[int]]:
        """(padded length, indices of the sequences) of `step`."""
        epoch, index = divmod(step, self.per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        return self._epoch[1][index]

    def _order(self, epoch: int) -> list[tuple[int, list[int]]]:
        generator = generator_of(self._seed, ORDER, epoch)
        batches = []
        for length, members in sorted(self._buckets.items()):
            order = [members[i] for i in torch.randperm(len(members), generator=generator).tolist()]
            for start in range(0, len(order), self._rows):
                chosen = order[start : start + self._rows]
                filler = (order * self._rows)[: self._rows - len(chosen)]
                batches.append((length, chosen + filler))
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
