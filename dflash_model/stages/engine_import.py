"""The engine's way to a sample's states: taken from its files once one prompt was computed here and agrees layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dflash_model.errors import InputError
from dflash_model.target.engine_check import check_engine_states
from dflash_model.target.engine_states import EngineFiles, open_engine_files
from dflash_model.target.extraction import OpenTarget
from dflash_model.target.fidelity import Thresholds
from dflash_model.target.hidden_states import CapturedStates
from dflash_model.target.layer_checks import LayerCheck
from dflash_model.target.references import Reference

COMPARED_TOKENS = 64
"""The prompt that is computed again is the shortest of at least so many tokens: enough to cross a chunk of linear attention."""


class EngineImport:
    """An engine's files as a source of states for one target."""

    def __init__(self, settings: dict[str, Any], target: OpenTarget, *, taps: Sequence[int]) -> None:
        """`settings`: engine, path, layer_ids. Raises ConfigError, InputError and StorageError for files that will not do."""
        self._target = target
        backbone = target.backbone
        self._files = open_engine_files(
            settings["engine"], Path(settings["path"]), settings["layer_ids"], num_layers=backbone.num_layers
        )
        _require(self._files, taps)
        self._compared: tuple[str, torch.Tensor] | None = None

    def backend(self) -> dict[str, Any]:
        """What is recorded of the states' maker; the engine does not say which kernels it ran."""
        return {
            "engine": self._files.engine,
            "layer_ids": list(self._files.layer_ids),
            "kernels": {},
            "versions": {},
        }

    def check(self, references: Sequence[Reference], thresholds: Thresholds) -> LayerCheck:
        """Compare one sample with our own states. Raises NotEvaluable where they differ, naming the layers and the cause."""
        enough = [reference for reference in references if len(reference.token_ids) >= COMPARED_TOKENS] or list(references)
        chosen = min(enough, key=lambda reference: len(reference.token_ids))
        backbone = self._target.backbone
        states = self._files.read(chosen.token_ids, hidden_size=backbone.hidden_size)
        taps = range(backbone.num_layers + 1)
        (ours,) = self._target.extract([chosen.token_ids], taps)
        self._compared = (chosen.sample_id, ours.final)
        device = next(backbone.norm.parameters()).device
        with torch.no_grad():
            normed = backbone.norm(ours.final[None].to(device))[0].to("cpu")
        exact = states.dtype == backbone.dtype == torch.float32
        return check_engine_states(
            states,
            self._files.tap_indices,
            [ours.taps[tap] for tap in taps],
            normed=normed,
            tolerance=thresholds.engine_l2_float32 if exact else thresholds.engine_l2_bfloat16,
            sample_id=chosen.sample_id,
        )

    def captured(self, references: Sequence[Reference], taps: Sequence[int]) -> Iterator[tuple[CapturedStates, bool]]:
        """Each sample's states at `taps`, and whether their `final` can be judged.

        Where the engine did not deliver the last layer, ours stands in for the compared sample; elsewhere there is none.
        """
        backbone = self._target.backbone
        rows = {tap: row for row, tap in enumerate(self._files.tap_indices)}
        last = rows.get(backbone.num_layers)
        for reference in references:
            states = self._files.read(reference.token_ids, hidden_size=backbone.hidden_size)
            final = states[:0, 0] if last is None else states[:, last]
            if last is None and self._compared is not None and self._compared[0] == reference.sample_id:
                final = self._compared[1]
            yield CapturedStates(taps={tap: states[:, rows[tap]] for tap in taps}, final=final), len(final) > 0


def _require(files: EngineFiles, taps: Sequence[int]) -> None:
    """Raises InputError where the files lack wanted taps, with the usual reason: ids that were given one too low."""
    held = set(files.tap_indices)
    if set(taps) <= held:
        return
    hint = ""
    if {tap - 1 for tap in taps} <= held:
        hint = " They are one lower each: z-lab ids were given to an engine that counts from the embedding (i + 1)."
    raise InputError(
        f"The {files.engine} files hold taps {sorted(held)}, but the drafters need {sorted(taps)}.{hint}",
        "Start the engine with the layer ids of these taps, and with the last layer's, so that the gate can judge each sample.",
    )
