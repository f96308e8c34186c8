"""One sample's states on a host's disk: found by what they depend on, written as soon as they are there.

A part is named by target weights, tokens, prompt length and whatever computed it: states of another kernel, dtype or
library version have another name, so they are never taken for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_model.artifacts import Manifest
from dflash_model.digests import json_digest
from dflash_model.storage import artifacts_dir, find_artifact, writing_artifact
from dflash_model.target.fidelity import SampleFidelity
from dflash_model.target.hidden_states import CapturedStates
from dflash_model.target.layer_checks import LayerCheck
from dflash_model.target.references import Reference
from dflash_model.target.states_file import SampleStates, write_states

STATES_FILE = "states.safetensors"
NAMING = 2
"""Raised when the same inputs give other states: 2 since kernels and versions belong to the name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStore:
    """The parts of one target, made in one way, on this host."""

    work_dir: Path
    """The host's work directory."""

    weights_digest: str
    """Of the target's weights."""

    maker: str
    """Digest of what computed the states: kernels, dtype, device, versions, batching; or of an engine's files."""

    def family(self, reference: Reference) -> str:
        """What the parts of one sample have in common: all but their taps."""
        named = [NAMING, self.weights_digest, reference.token_digest, len(reference.prompt_ids), self.maker]
        return f"states-{json_digest(named)[:24]}"

    def existing(self, reference: Reference, taps: Sequence[int]) -> tuple[list[Manifest], set[int]]:
        """Parts that hold wanted taps, those with more of them first, none that adds nothing; and the taps they cover."""
        paths = sorted(artifacts_dir(self.work_dir).glob(f"{self.family(reference)}-t*"))
        found = [manifest for path in paths if (manifest := find_artifact(self.work_dir, path.name)) is not None]
        found.sort(key=lambda manifest: -len(set(manifest.facts["taps"]) & set(taps)))
        chosen: list[Manifest] = []
        covered: set[int] = set()
        for manifest in found:
            adds = (set(manifest.facts["taps"]) & set(taps)) - covered
            if adds:
                chosen.append(manifest)
                covered |= adds
        return chosen, covered

    def write(
        self,
        reference: Reference,
        captured: CapturedStates,
        *,
        fidelity: SampleFidelity,
        backend: dict[str, Any],
        checks: Sequence[LayerCheck],
    ) -> Manifest:
        """Keep one sample's taps with what the gate measured. Raises StorageError."""
        taps = sorted(captured.taps)
        key = f"{self.family(reference)}-t{'.'.join(map(str, taps))}"
        with writing_artifact(self.work_dir, kind="sample_states", key=key) as writer:
            states = SampleStates(
                sample_id=reference.sample_id,
                token_ids=reference.token_ids,
                tap_indices=tuple(taps),
                hidden_states=torch.stack([captured.taps[tap] for tap in taps], dim=1),
                target_digest=self.weights_digest,
                backend=backend,
            )
            write_states(writer.path / STATES_FILE, states)
            kept = fidelity.to_json() | {"deltas_nats": None}
            writer.facts |= {"taps": taps, "fidelity": kept, "backend": backend, "checks": [asdict(check) for check in checks]}
        made = find_artifact(self.work_dir, key)
        assert made is not None
        return made


def kept_fidelity(part: Manifest) -> SampleFidelity:
    """What the gate measured when the part was made; `fidelity.assess` draws today's lines."""
    return SampleFidelity.from_json(part.facts["fidelity"])


def kept_checks(part: Manifest) -> tuple[LayerCheck, ...]:
    """The exact checks of the target that made the part, all of which held."""
    return tuple(LayerCheck(**check) for check in part.facts["checks"])
