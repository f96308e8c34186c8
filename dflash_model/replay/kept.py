"""Kept records: what any replay on this host recorded of one drafter on one sequence, so that no anchor is computed twice.

A file is named by everything that decides its numbers, and by nothing else: not by the walks or the tail rule that asked
for them. It only ever saves work; what an artifact holds is chosen from it anew each time.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_model.digests import json_digest
from dflash_model.errors import StorageError
from dflash_model.replay.records import RECORDS_VERSION, SampleRecords, Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptRecords:
    """The records of one drafter, computed in one way, in one directory of a host."""

    directory: Path
    """Where the files lie, beside other kept work."""

    origin: str
    """Digest of what all of them share: the drafter, the target's tables, the block size, the candidates kept."""

    def path(self, sequence: Sequence, token_ids: Seq[int], states: Seq[str]) -> Path:
        """Where the records of this sequence lie, scored on states with these digests."""
        lengths = [sequence.prompt_length, sequence.completion_length, sequence.overshoot_length, sequence.stopped]
        named = json_digest([RECORDS_VERSION, self.origin, lengths, list(token_ids), sorted(states)])
        return self.directory / f"records-{named[:32]}.safetensors"

    def load(self, path: Path, sequence: Sequence) -> SampleRecords | None:
        """What is there, under this sequence's id; None where there is nothing, or nothing whole."""
        if not path.is_file():
            return None
        try:
            found = SampleRecords.load(path)
        except (StorageError, KeyError, ValueError):
            return None
        return replace(found, sequence=sequence) if replace(found.sequence, sample_id=sequence.sample_id) == sequence else None

    def save(self, path: Path, records: SampleRecords) -> None:
        """Keep them, whole or not at all. Raises EvalError."""
        records.save(path)
