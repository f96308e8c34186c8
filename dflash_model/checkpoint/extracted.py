"""A drafter that was taken out of its checkpoint on the way to this host: its weights, and beside them what was left behind.

`extracted.json` is written last, so its presence means that the directory is complete. Adopting the weights gives the same
report as an extraction here would have.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_model.checkpoint.extract import ExtractReport
from dflash_model.digests import file_digest
from dflash_model.errors import StorageError, from_os_error
from dflash_model.storage import read_json

WEIGHTS_NAME = "model.safetensors"
EXTRACTED_NAME = "extracted.json"
_FORMAT = 1
_AGAIN = "Run again; the checkpoint is moved anew."


@dataclass(frozen=True, kw_only=True, slots=True)
class Extracted:
    """What lies beside the weights."""

    report: ExtractReport
    """As of an extraction on this host."""

    transfer: dict[str, Any]
    """True of this moving only: source, bytes moved, how they were checked."""

    def to_json(self) -> bytes:
        """The content of extracted.json; `from_json` reads it back."""
        data = {"format_version": _FORMAT, "report": asdict(self.report), "transfer": self.transfer}
        return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "surrogatepass")

    @classmethod
    def from_json(cls, data: Any, *, where: str) -> Extracted:
        """Read what `to_json` gave, parsed. Raises StorageError saying `where` it lies."""
        try:
            if data["format_version"] != _FORMAT:
                raise StorageError(f"{where} is of format {data['format_version']!r}, not {_FORMAT}.", _AGAIN)
            report = data["report"] | {"prefixes": tuple(data["report"]["prefixes"])}
            return cls(report=ExtractReport(**report), transfer=dict(data["transfer"]))
        except (KeyError, TypeError) as exc:
            raise StorageError(f"{where} is damaged: {exc}.", _AGAIN) from exc


def adopt_extracted(directory: Path, destination: Path) -> Extracted:
    """Put the weights of `directory` to `destination`, without a copy where the disk allows. Raises StorageError where they differ."""
    where = directory / EXTRACTED_NAME
    found = Extracted.from_json(read_json(where), where=str(where))
    weights = directory / WEIGHTS_NAME
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(weights, destination)
        except OSError:
            shutil.copyfile(weights, destination)
        digest = file_digest(destination)
    except OSError as exc:
        raise from_os_error(exc, f"taking over {weights}") from exc
    if digest != found.report.sha256:
        destination.unlink()
        raise StorageError(
            f"{weights} differs from what arrived (sha256 {digest[:12]}.., expected {found.report.sha256[:12]}..).",
            f"Delete {directory} and run again; check the disk of that host if it repeats.",
        )
    return found
