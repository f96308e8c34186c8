"""What a stage program answers: JSON lines that come in pieces of any size."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 1 << 20


class AnswerLines:
    """Bytes in, events out: each complete line once. Rubbish and lines longer than MAX_LINE_BYTES are skipped."""

    def __init__(self) -> None:
        self._pending = b""
        self._overlong = False

    def feed(self, block: bytes) -> list[dict[str, Any]]:
        """The events whose lines end within `block`."""
        *lines, self._pending = (self._pending + block).split(b"\n")
        if lines and self._overlong:
            del lines[0]
            self._overlong = False
        if len(self._pending) > MAX_LINE_BYTES:
            self._overlong, self._pending = True, b""
        return _events(lines)


def _events(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            log.warning("a stage answered a line that is not JSON: %.80r", line)
            continue
        if isinstance(event, dict):
            found.append(event)
    return found
