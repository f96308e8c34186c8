"""Patterns over listings give what pathlib gives over the same directories."""

import random
from pathlib import Path, PurePosixPath

import pytest

from tasks.remote.ssh_glob import Entry, candidates


def listing_of(root: Path, asked: list[PurePosixPath]) -> list[Entry]:
    directory = Path(asked[-1])
    if not directory.is_dir():
        return []
    return [Entry(p.name, p.is_dir() and not p.is_symlink(), p.is_symlink()) for p in directory.iterdir()]


def found(root: Path, pattern: str, asked: list[PurePosixPath]) -> list[str]:
    def listing(path: PurePosixPath) -> list[Entry]:
        asked.append(path)
        return listing_of(root, asked)

    paths = candidates(pattern, start=PurePosixPath(root), listing=listing)
    return sorted(str(p.relative_to(root)) for p in paths if Path(p).exists())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    rng = random.Random(7)
    names = ["a", "b", "ab", ".h", "a.pt", "b.pt", "c[1]", "x*y", "d e"]
    for _ in range(60):
        parts = rng.choices(names, k=rng.randint(1, 4))
        path = tmp_path.joinpath(*parts)
        if not any(parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                path.write_text("x")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "gone").symlink_to("nowhere")
    return tmp_path


def test_random_patterns_agree_with_pathlib(tree: Path) -> None:
    rng = random.Random(8)
    pieces = ["*", "?", "a*", "*.pt", "[ab]", "[!a]*", "**", "a", "link", "c[[]1]", "x[*]y", "d e", ".*", "gone", "none"]
    matches = 0
    for _ in range(400):
        pattern = "/".join(rng.choices(pieces, k=rng.randint(1, 4)))
        here = sorted({str(p.relative_to(tree)) for p in tree.glob(pattern) if p.exists()})
        assert found(tree, pattern, []) == here, pattern
        matches += len(here)
    assert matches > 400


def test_names_without_wildcards_are_not_listed(tree: Path) -> None:
    asked: list[PurePosixPath] = []
    assert found(tree, "c[[]1]/none/a", asked) == []
    assert asked == []
    found(tree, f"{tree}/a/*", asked)
    assert asked == [PurePosixPath(tree / "a")]
