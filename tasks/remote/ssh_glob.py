"""Shell patterns over any way of listing a directory, with the answers that pathlib's glob gives on a local disk."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

_QUOTED = re.compile(r"\[([*?\[])\]")
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of a directory."""

    name: str
    """Without its directory."""

    is_dir: bool
    """A directory itself."""

    is_link: bool = False
    """A symbolic link, to whatever."""


Listing = Callable[[PurePosixPath], list[Entry]]
"""The entries of a directory; [] where it is none, is gone, or may not be read."""


def candidates(pattern: str, *, start: PurePosixPath, listing: Listing) -> set[PurePosixPath]:
    """Paths that may match: names without wildcards are not looked at, so the caller must see whether they exist.

    Relative patterns begin at `start`. `**` stands for any number of directories and follows no symbolic link.
    """
    parts = PurePosixPath(pattern).parts
    base, rest = (PurePosixPath("/"), parts[1:]) if pattern.startswith("/") else (start, parts)
    return set(_expand(base, rest, listing))


def _expand(base: PurePosixPath, parts: tuple[str, ...], listing: Listing) -> Iterator[PurePosixPath]:
    if not parts:
        yield base
        return
    first, rest = parts[0], parts[1:]
    literal = _literal(first)
    if literal is not None:
        yield from _expand(base / literal, rest, listing)
    elif first == "**":
        for directory in _tree(base, listing):
            yield from _expand(directory, rest, listing)
    else:
        for entry in listing(base):
            if fnmatch.fnmatchcase(entry.name, first) and (not rest or entry.is_dir or entry.is_link):
                yield from _expand(base / entry.name, rest, listing)


def _tree(base: PurePosixPath, listing: Listing) -> Iterator[PurePosixPath]:
    yield base
    for entry in listing(base):
        if entry.is_dir:
            yield from _tree(base / entry.name, listing)


def _literal(part: str) -> str | None:
    """The one name that `part` matches ("a[*]b" is "a*b"), None for a real pattern."""
    return None if _WILD.search(_QUOTED.sub("", part)) else _QUOTED.sub(r"\1", part)
