"""Published prompt sets from local files of their own schema; without the package or the hub, a sentence."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_model.errors import ConfigError, InputError
from dflash_model.target.prompt_sets import SETS, prompt_lines
from dflash_model.target.prompts import read_prompts
from tasks.prompt_views import write_prompt_set

ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": "Two and two? ", "answer": "#### 4"}],
    "math500": [{"problem": "What is $1+1$?", "subject": "Algebra", "level": 1, "answer": "2"}],
    "humaneval": [{"task_id": "HumanEval/0", "prompt": 'def one():\n    """One."""\n', "entry_point": "one"}],
    "mbpp": [{"task_id": 2, "prompt": "Write a function for one.", "test_list": ["assert one() == 1", "assert one() < 2"]}],
    "mt-bench": [{"prompt_id": 81, "category": "writing", "prompt": ["First turn.", "Second turn."]}],
}
PARTS = {
    "gsm8k": ("Two and two?\n", "\\boxed{}"),
    "math500": ("What is $1+1$?", "\\boxed{}"),
    "humaneval": ("```python\ndef one():", "code block"),
    "mbpp": ("Write a function for one.", "assert one() == 1\nassert one() < 2"),
    "mt-bench": ("First turn.", "First turn."),
}


class FakeDatasets:
    """Stands in for the package where it is not installed: reads JSON lines, and has no hub."""

    class exceptions:
        DatasetsError = type("DatasetsError", (Exception,), {})

    @staticmethod
    def load_dataset(kind: str, config: str | None = None, **options: Any) -> list[dict[str, Any]]:
        if kind != "json":
            raise ConnectionError(f"Couldn't reach '{kind}' on the Hub (LocalEntryNotFoundError)")
        return [json.loads(line) for file in options["data_files"] for line in Path(file).read_text().splitlines()]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real package, offline, where it is installed; else a stand-in."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    if importlib.util.find_spec("datasets") is None:
        monkeypatch.setitem(sys.modules, "datasets", FakeDatasets)


def directory(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    place = tmp_path / "set" / "data"
    place.mkdir(parents=True)
    (place / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place.parent


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", list(SETS))
def test_each_set_becomes_prompts_that_are_read_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / "prompts.jsonl"
    assert write_prompt_set(name, path, source=directory(tmp_path, ROWS[name]), revision=None, limit=None) == 1
    (prompt,) = read_prompts(path)
    assert prompt.id == f"{name}-0000"
    assert prompt.category == {"math500": "Algebra", "mt-bench": "writing"}.get(name, name)
    assert prompt.messages is not None
    assert [message["role"] for message in prompt.messages] == ["user"]
    assert all(part in prompt.messages[0]["content"] for part in PARTS[name])
    assert "Second turn" not in prompt.messages[0]["content"]


@pytest.mark.usefixtures("package")
def test_a_limit_takes_rows_from_all_over_the_set(tmp_path: Path) -> None:
    source = directory(tmp_path, [{"question": f"q{n}", "answer": ""} for n in range(10)])
    lines = [json.loads(line) for line in prompt_lines("gsm8k", source=source, revision=None, limit=4)]
    assert [line["id"] for line in lines] == ["gsm8k-0000", "gsm8k-0002", "gsm8k-0005", "gsm8k-0007"]


@pytest.mark.usefixtures("package")
def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"There is no prompt set 'gsm'"):
        prompt_lines("gsm", source=None, revision=None, limit=None)
    with pytest.raises(InputError, match=r"openai/gsm8k cannot be fetched from the hub: .*[^.]\.\n") as caught:
        prompt_lines("gsm8k", source=None, revision=None, limit=None)
    assert "--source" in caught.value.fix
    with pytest.raises(InputError, match="holds no parquet or JSON files"):
        prompt_lines("gsm8k", source=tmp_path / "nowhere", revision=None, limit=None)
    with pytest.raises(InputError, match=r"Row 0 of .* is no row of mbpp: KeyError 'text'; it has answer, question\."):
        prompt_lines("mbpp", source=directory(tmp_path, ROWS["gsm8k"]), revision=None, limit=None)


def test_without_the_package_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="package `datasets`, which is not installed") as caught:
        prompt_lines("gsm8k", source=None, revision=None, limit=None)
    assert "pip install 'dflash-eval[datasets]'" in caught.value.fix


@pytest.mark.usefixtures("package")
def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        write_prompt_set("gsm8k", path, source=directory(tmp_path, ROWS["gsm8k"]), revision=None, limit=None)
    assert path.read_text() == "mine"
