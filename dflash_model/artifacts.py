"""The data between stages. Tensors stay on disk: an artifact is a directory, and what travels is its manifest.

An artifact lies at `<work dir>/artifacts/<key>/` on each host that holds it. manifest.json is written last, so a
directory without one is not an artifact. Its `digest` covers content only (files, parts, facts): no time, no host.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_model.digests import json_digest

MANIFEST_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of an artifact."""

    name: str
    """Path below the artifact's directory, with forward slashes."""

    size_bytes: int
    """Exact size; the cheap part of "is it there"."""

    sha256: str
    """64 hex digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What one artifact is: its name, its content and the facts that readers need without opening a file."""

    kind: str
    """checkpoint, prompts, references, tables, states, sample_states, replay, comparison, ..."""

    key: str
    """Name of the directory; for a stage's output the stage key."""

    files: tuple[FileEntry, ...]
    """Every file but manifest.json, sorted by name."""

    parts: dict[str, str] = field(default_factory=dict)
    """Other artifacts that belong to this one: key -> digest. They lie beside it on the same host."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Small JSON facts about the content, part of the digest."""

    made_by: dict[str, Any] = field(default_factory=dict)
    """Library versions, durations, peak memory, when and where: true of this making, not part of the digest."""

    @property
    def digest(self) -> str:
        """sha256 over kind, files, parts and facts."""
        return json_digest(
            {"kind": self.kind, "files": [asdict(f) for f in self.files], "parts": self.parts, "facts": self.facts}
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of this artifact's own files, without its parts."""
        return sum(f.size_bytes for f in self.files)

    def to_json(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return {"format_version": MANIFEST_VERSION, "digest": self.digest, "size_bytes": self.size_bytes} | asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Manifest:
        """Read what `to_json` gave; ValueError where it is of another version or its digest does not match."""
        if data.get("format_version") != MANIFEST_VERSION:
            raise ValueError(f"manifest format_version {data.get('format_version')!r}, expected {MANIFEST_VERSION}")
        manifest = cls(
            kind=data["kind"],
            key=data["key"],
            files=tuple(FileEntry(**entry) for entry in data["files"]),
            parts=data["parts"],
            facts=data["facts"],
            made_by=data["made_by"],
        )
        if manifest.digest != data.get("digest"):
            raise ValueError(f"manifest of {manifest.key} does not match its own digest")
        return manifest
