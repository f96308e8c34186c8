"""What a host's Python offers: its version, and the versions of the packages that stage programs import.

The question is cheap: nothing is imported there. A package that is installed but broken shows when a stage imports it.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

from dflash_model.errors import EvalError, HostError
from tasks.remote.code import PACKAGE, last_line
from tasks.remote.command import program
from tasks.remote.shell import Shell

REQUIRED = ("torch", "transformers", "safetensors", "numpy", "scipy")
MIN_PYTHON = (3, 11)
PROBE_TIMEOUT_S = 60.0
_IMPORT_PROBLEM = re.compile(r"failed with (?:ModuleNotFoundError|ImportError): (?P<reason>.*)", re.DOTALL)

_PROBE = """
import importlib.metadata, importlib.util, json, sys
found = {}
for name in sys.argv[1:]:
    found[name] = None
    if importlib.util.find_spec(name) is not None:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "of unknown version"
print(json.dumps({"python": list(sys.version_info[:3]), "versions": found}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPackages:
    """One interpreter of one host."""

    python: tuple[int, int, int]
    """Its version."""

    versions: dict[str, str | None]
    """Package -> version; None where it cannot be imported."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Packages that cannot be imported."""
        return tuple(name for name, version in self.versions.items() if version is None)

    @property
    def usable(self) -> bool:
        """True when Python is new enough and no package is missing."""
        return self.python >= MIN_PYTHON and not self.missing

    def __str__(self) -> str:
        packages = [f"{name} {version}" if version else f"no {name}" for name, version in self.versions.items()]
        return ", ".join([f"Python {'.'.join(map(str, self.python))}", *packages])


def probe_packages(shell: Shell, *, python: str) -> HostPackages:
    """Ask a host's interpreter. Raises HostError where it cannot be reached, is not there or is far too old to answer."""
    done = shell.run(f"{program(python)} {shlex.join(['-c', _PROBE, *REQUIRED])}", timeout_s=PROBE_TIMEOUT_S)
    try:
        answer = json.loads(done.stdout)
        major, minor, micro = answer["python"]
        return HostPackages(python=(major, minor, micro), versions=answer["versions"])
    except (ValueError, KeyError, TypeError) as exc:
        raise HostError(
            f"[{shell.name}] {python} is no Python that we can use: {last_line(done.stderr)}.",
            f"Name one of version {_dotted(MIN_PYTHON)} or newer as `python` of that host.",
        ) from exc


def import_problem(error: EvalError) -> str | None:
    """What a stage could not import, in Python's words; None where it failed otherwise, or over a module of our own."""
    found = _IMPORT_PROBLEM.search(error.problem)
    if found is None or re.search(rf"No module named '{PACKAGE}\b", found["reason"]):
        return None
    return found["reason"].strip().rstrip(".")


def wrong_packages(shell: Shell, *, python: str, what: str, reason: str) -> HostError:
    """The error for a host whose interpreter cannot import what a stage needs (`reason`, in Python's words)."""
    try:
        offers = str(probe_packages(shell, python=python))
    except HostError:
        offers = "it does not say what it has"
    return HostError(
        f"{what}: the host has the wrong packages: {reason} ({offers}).",
        f"Install the versions of requirements.lock for {python} there, or name another `python` for that host.",
    )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
