"""`prompts show`: head and tail as ids and text, for a target here or on another host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dflash_model.errors import InputError
from dflash_model.target.prompts import load_tokenizer, template_digest
from flows.cli import main
from tasks.prompt_views import view_prompts
from tests.tiny_targets import DEMO_PROMPTS, DEMO_TARGET


def test_a_long_prompt_shows_its_ends_and_a_short_one_all(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        json.dumps({"id": "long", "prompt_ids": list(range(100, 110))}) + "\n" + json.dumps({"id": "s", "prompt_ids": [7, 8]})
    )
    view = view_prompts(path, None, str(DEMO_TARGET), thinking=None, ids=[], first=5, edge=4)
    long, short = view.prompts
    assert (view.count, view.tokens) == (2, 12)
    assert long.tail is not None
    assert (long.head.token_ids, long.tail.token_ids) == ((100, 101, 102, 103), (106, 107, 108, 109))
    assert (short.head.token_ids, short.tail) == ((7, 8), None)
    tokenizer = load_tokenizer(DEMO_TARGET)
    assert long.tail.text == tokenizer.decode([106, 107, 108, 109])
    assert view.template_digest == template_digest(tokenizer, thinking=None)


def test_the_command_reads_only_the_tokenizer_and_leaves_the_host_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "gpu" / "models" / "target"
    there.mkdir(parents=True)
    for path in DEMO_TARGET.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, there)
    before = sorted(str(path) for path in (tmp_path / "gpu").rglob("*"))
    (tmp_path / "hosts.yaml").write_text("hosts:\n  gpu: {work_dir: gpu, roles: [target]}\n")
    words = ["prompts", "show", str(DEMO_PROMPTS), "--id", "count-1", "--home", str(tmp_path / "home")]
    assert main([*words, "--target", f"gpu:{there}", "--hosts", str(tmp_path / "hosts.yaml")]) == 0
    remote = capsys.readouterr().out
    assert main([*words, "--target", str(DEMO_TARGET)]) == 0
    assert capsys.readouterr().out == remote
    assert "count-1, count: " in remote
    assert "'<|im_start|>user\\n" in remote
    assert "thinking: the template's own default" in remote
    assert "29 more" in remote
    assert sorted(str(path) for path in (tmp_path / "gpu").rglob("*")) == before


def test_an_unknown_id_and_a_wanted_thinking_mode_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no prompt 'x'"):
        view_prompts(DEMO_PROMPTS, None, str(DEMO_TARGET), thinking=None, ids=["x"], first=1, edge=4)
    words = ["prompts", "show", str(DEMO_PROMPTS), "--target", str(DEMO_TARGET), "--home", str(tmp_path), "--thinking"]
    assert main(words) == 2
    assert "no enable_thinking" in capsys.readouterr().err
