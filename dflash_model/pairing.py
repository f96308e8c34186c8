"""Whether two drafters' records speak of the same tokens: a difference between them means nothing otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflash_model.errors import InputError
from dflash_model.replay.records import UNKNOWN, SampleRecords


def check_same_tokens(candidate: Sequence[SampleRecords], reference: Sequence[SampleRecords], *, names: tuple[str, str]) -> None:
    """Both drafters were scored on the same references, in the same order. Raises InputError that names the first difference."""
    fix = "Replay both drafters on the same references."
    ids = [[records.sequence.sample_id for records in samples] for samples in (candidate, reference)]
    if ids[0] != ids[1]:
        unpaired = sorted(set(ids[0]) ^ set(ids[1]))
        detail = f"only one has {', '.join(unpaired[:5])}" if unpaired else "their order differs"
        raise InputError(f"{names[0]} and {names[1]} were not scored on the same prompts: {detail}.", fix)
    for ours, theirs in zip(candidate, reference, strict=True):
        shapes = {(s.prompt_length, s.completion_length, s.stopped) for s in (ours.sequence, theirs.sequence)}
        if len(shapes) != 1 or not _same_true_ids(ours, theirs):
            sample_id = ours.sequence.sample_id
            raise InputError(f"{names[0]} and {names[1]} were scored on different tokens of prompt {sample_id}.", fix)


def _same_true_ids(ours: SampleRecords, theirs: SampleRecords) -> bool:
    """Whether the known true tokens agree at the anchors that both have, over the slots that both have."""
    _, left, right = np.intersect1d(ours.anchors, theirs.anchors, return_indices=True)
    slots = min(ours.true_ids.shape[1], theirs.true_ids.shape[1])
    a, b = ours.true_ids[left, :slots], theirs.true_ids[right, :slots]
    return bool(np.all((a == b) | (a == UNKNOWN) | (b == UNKNOWN)))
