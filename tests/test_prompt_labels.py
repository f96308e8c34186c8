"""Labels of prompts: taken where a line gives one, never made up."""

import json
from pathlib import Path

from dflash_model.target.prompt_labels import prompt_labels


def test_language_and_mode_are_taken_by_id_and_missing_ones_are_left_out(tmp_path: Path) -> None:
    lines = [
        {"id": "a", "prompt": "x", "language": "en"},
        {"prompt": "y", "language": "zh", "mode": "thinking"},
        {"id": "c", "prompt": "z", "mode": 3, "colour": "red"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(lines[0]) + "\n\n" + json.dumps(lines[1]) + "\n" + json.dumps(lines[2]) + "\n")
    assert prompt_labels(path) == {"language": {"a": "en", "line-0003": "zh"}, "mode": {"line-0003": "thinking"}}


def test_a_set_without_labels_has_no_axis(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "x"}\n')
    assert prompt_labels(path) == {}
