"""References of single samples, kept as soon as they are made: a killed stage goes on, and more prompts cost only theirs.

An answer of a serving engine is first kept as pending, with what the engine said to a fixed prompt at the time. It counts
once the engine was seen to be the same afterwards. A pending answer of a killed stage counts where the engine still is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dflash_model.errors import StorageError, from_os_error
from dflash_model.storage import read_json, write_json
from dflash_model.target.prompts import RenderedPrompt
from dflash_model.target.references import Reference, reference_from_json, reference_to_json

Kept = Reference | str
"""A reference, or the reason why this sample has none."""


class SampleStore:
    """The directory `<work dir>/samples`."""

    def __init__(self, directory: Path, key_of: Callable[[RenderedPrompt], str], *, fresh: bool = False) -> None:
        """`fresh`: what is kept is made anew; it is replaced sample by sample."""
        self._directory, self._key_of, self._fresh = directory, key_of, fresh

    def read(self, prompt: RenderedPrompt) -> Kept | None:
        """What is kept for the same tokens, under this prompt's id; None where there is nothing or it is damaged."""
        return None if self._fresh else _parse(_content(self._path(prompt)), prompt)

    def write(self, prompt: RenderedPrompt, kept: Kept) -> None:
        """Keep it. Raises EvalError."""
        write_json(self._path(prompt), _content_of(kept))

    def read_pending(self, prompt: RenderedPrompt) -> tuple[Kept, dict[str, Any]] | None:
        """(what waits for confirmation, what was noted with it), or None."""
        data = None if self._fresh else _content(self._pending(prompt))
        noted = data.pop("noted", None) if data is not None else None
        kept = _parse(data, prompt)
        return None if kept is None or not isinstance(noted, dict) else (kept, noted)

    def write_pending(self, prompt: RenderedPrompt, kept: Kept, noted: dict[str, Any]) -> None:
        """Keep it for now, with a note. Raises EvalError."""
        write_json(self._pending(prompt), _content_of(kept) | {"noted": noted})

    def confirm(self, prompt: RenderedPrompt, kept: Kept) -> None:
        """From now on it counts. Raises EvalError."""
        self.write(prompt, kept)
        self.drop_pending(prompt)

    def drop_pending(self, prompt: RenderedPrompt) -> None:
        """It does not count. Raises EvalError."""
        path = self._pending(prompt)
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise from_os_error(exc, f"removing {path}") from exc

    def _path(self, prompt: RenderedPrompt) -> Path:
        return self._directory / f"{self._key_of(prompt)}.json"

    def _pending(self, prompt: RenderedPrompt) -> Path:
        return self._directory / f"{self._key_of(prompt)}.pending.json"


def _content_of(kept: Kept) -> dict[str, Any]:
    return {"refused": kept} if isinstance(kept, str) else reference_to_json(kept)


def _content(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        data = read_json(path)
    except StorageError:
        return None
    return data if isinstance(data, dict) else None


def _parse(data: dict[str, Any] | None, prompt: RenderedPrompt) -> Kept | None:
    if data is None:
        return None
    if isinstance(data.get("refused"), str):
        return str(data["refused"])
    try:
        reference = reference_from_json(data | {"sample_id": prompt.id})
    except (ValueError, KeyError, TypeError):
        return None
    return reference if reference.prompt_ids == tuple(prompt.token_ids) else None
