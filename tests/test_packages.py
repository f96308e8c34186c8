"""What a host's Python offers, and how a host that lacks something is told from a stage that is wrong."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from dflash_model.errors import HostError, StageError
from tasks.remote.packages import HostPackages, import_problem, probe_packages, wrong_packages
from tests.local_shell import LocalShell


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python without any package."""
    path = tmp_path / "bare python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_the_versions_of_an_interpreter_are_told() -> None:
    found = probe_packages(LocalShell(), python=sys.executable)
    assert found.python == sys.version_info[:3]
    assert found.versions["torch"] == importlib.metadata.version("torch")
    assert found.missing == ()
    assert found.usable
    assert f"torch {importlib.metadata.version('torch')}" in str(found)


def test_packages_that_are_missing_are_named(bare_python: str) -> None:
    found = probe_packages(LocalShell(), python=bare_python)
    assert found.missing == ("torch", "transformers", "safetensors", "numpy", "scipy")
    assert not found.usable
    assert "no torch, no transformers" in str(found)


def test_an_old_python_is_not_usable() -> None:
    packages = {"torch": "2.13.0"}
    assert HostPackages(python=(3, 11, 0), versions=packages).usable
    assert not HostPackages(python=(3, 10, 14), versions=packages).usable


@pytest.mark.parametrize("program", ["/none/python", "/bin/false", "/bin/echo"])
def test_what_is_no_python_is_a_host_error(program: str) -> None:
    with pytest.raises(HostError, match=rf"\[h\] {program} is no Python that we can use: "):
        probe_packages(LocalShell(), python=program)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("Stage x failed with ModuleNotFoundError: No module named 'torch'.", "No module named 'torch'"),
        ("Stage x failed with ImportError: cannot import name 'A' from 'b' (/c.py).", "cannot import name 'A' from 'b' (/c.py)"),
        ("Stage x failed with ModuleNotFoundError: No module named 'dflash_model.gone'.", None),
        ("Stage x failed with ModuleNotFoundError: No module named 'dflash_models'.", "No module named 'dflash_models'"),
        ("Stage x failed with ZeroDivisionError: oops.", None),
    ],
)
def test_an_import_that_failed_for_want_of_a_package_is_recognised(problem: str, reason: str | None) -> None:
    assert import_problem(StageError(problem)) == reason


def test_wrong_packages_say_what_was_missed_and_what_there_is(bare_python: str) -> None:
    error = wrong_packages(LocalShell(), python=bare_python, what="[h] stage x", reason="No module named 'torch'")
    assert error.problem.startswith("[h] stage x: the host has the wrong packages: No module named 'torch' (Python 3.")
    assert "no torch" in error.problem
    assert bare_python in error.fix


def test_wrong_packages_are_told_even_when_the_host_says_nothing_more() -> None:
    shell = LocalShell()
    shell.cut()
    error = wrong_packages(shell, python=sys.executable, what="[h] stage x", reason="No module named 'torch'")
    assert "No module named 'torch' (it does not say what it has)" in error.problem
