"""What several test files need: a host whose stage programs do as told, and Prefect kept out of the user's home."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.remote.processes import allow_children

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _children_allowed() -> Iterator[None]:
    allow_children()
    yield
    allow_children()


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter in which the stage `replay` does what its parameter `do` says."""
    path = tmp_path_factory.mktemp("bin") / "python"
    script = ROOT / "tests" / "fake_stage_interpreter.py"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "{script}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def living() -> Callable[[Path], list[str]]:
    """Command lines of living processes (zombies and ourselves excepted) that work in a directory or below it."""

    def look(directory: Path) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                inside = (process / "cwd").readlink().is_relative_to(directory)
                if inside and process.name != str(os.getpid()) and "\nState:\tZ" not in (process / "status").read_text():
                    found.append((process / "cmdline").read_text())
            except OSError:
                continue
        return found

    return look
