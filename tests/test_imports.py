"""Who may import whom. The walk reads the source; nothing is imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "dflash_model")
SCIENCE_FORBIDS = {"prefect", "paramiko", "flows", "tasks"}
REMOTE_MAY = {
    "dflash_model.artifacts",
    "dflash_model.digests",
    "dflash_model.errors",
    "dflash_model.parts",
    "dflash_model.storage",
    "dflash_model.checkpoint",
    "dflash_model.stages.process_groups",
    "dflash_model.stages.protocol",
    "dflash_model.stages.registry",
}
FLOWS_MAY = {
    "dflash_model",
    "dflash_model.artifacts",
    "dflash_model.digests",
    "dflash_model.errors",
    "dflash_model.evaluations",
    "dflash_model.figures",
    "dflash_model.gate",
    "dflash_model.history",
    "dflash_model.result",
    "dflash_model.stages.registry",
    "dflash_model.storage",
    "dflash_model.table",
    "dflash_model.trend",
}
WITHOUT_TORCH = (
    "checkpoint/",
    "artifacts.py",
    "digests.py",
    "parts.py",
    "storage.py",
    "errors.py",
    "metrics.py",
    "comparison.py",
    "report.py",
)


def imports_of(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports die when Prefect loads a flow by path"
            found.add(node.module or "")
    return found


def violations(path: Path, names: set[str]) -> list[str]:
    """Arrows of one file that point up or across."""
    relative = path.relative_to(ROOT).as_posix()
    wrong = []
    for name in names:
        top = name.split(".")[0]
        if relative.startswith("dflash_model/"):
            wrong += [name] if top in SCIENCE_FORBIDS else []
        elif relative.startswith("tasks/remote/"):
            allowed = top not in ("prefect", "torch", "flows", "transformers") and (
                top != "dflash_model" or any(name == may or name.startswith(f"{may}.") for may in REMOTE_MAY)
            )
            allowed = allowed and (top != "tasks" or name.startswith("tasks.remote"))
            wrong += [] if allowed else [name]
        elif relative.startswith("tasks/"):
            wrong += [name] if top in ("flows", "torch", "transformers") else []
        elif relative.startswith("flows/"):
            allowed = top not in ("torch", "transformers", "paramiko") and (top != "dflash_model" or name in FLOWS_MAY)
            wrong += [] if allowed else [name]
        if relative.removeprefix("dflash_model/").startswith(WITHOUT_TORCH) and top == "torch":
            wrong.append(name)
    return [f"{relative} imports {name}" for name in sorted(set(wrong))]


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_no_arrow_points_up() -> None:
    assert len(source_files()) > 40
    assert [line for path in source_files() for line in violations(path, imports_of(path))] == []


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("dflash_model/metrics.py", "tasks.call"),
        ("dflash_model/metrics.py", "torch"),
        ("dflash_model/checkpoint/torch_zip.py", "torch"),
        ("dflash_model/drafter/loading.py", "prefect"),
        ("tasks/remote/site.py", "prefect"),
        ("tasks/remote/site.py", "dflash_model.replay.engine"),
        ("tasks/remote/site.py", "tasks.call"),
        ("tasks/call.py", "flows.plan"),
        ("flows/evaluate.py", "dflash_model.replay.engine"),
    ],
)
def test_a_forbidden_arrow_is_noticed(place: str, name: str) -> None:
    assert violations(ROOT / place, {name}) == [f"{place} imports {name}"]


def test_importing_the_relay_side_loads_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, flows.cli, flows.environment, tasks.remote.site, tasks.remote.drafters, dflash_model.stages.registry;"
        "sys.exit(','.join(m for m in ('torch', 'transformers', 'prefect') if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    assert done.returncode == 0
