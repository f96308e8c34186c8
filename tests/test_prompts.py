"""Prompt files: every accepted form, every refusal by file and line; rendering through the target's own template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_model.errors import ConfigError, InputError
from dflash_model.target.prompts import Prompt, load_tokenizer, read_prompts, render, template_digest
from tests.tiny_targets import DEMO_PROMPTS, DEMO_TARGET

USER = {"role": "user", "content": "Count up from 11 to 33 by 2."}
THINKING_TEMPLATE = "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ messages[-1].content }}"


@pytest.fixture
def tokenizer() -> Any:
    return load_tokenizer(DEMO_TARGET)


def _file(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "p.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def _one(prompt: Prompt, tokenizer: Any, *, thinking: bool | None = None, max_prompt_tokens: int = 4000) -> Any:
    return render([prompt], tokenizer, thinking=thinking, max_prompt_tokens=max_prompt_tokens)[0]


def test_each_form_of_a_line_is_read(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        {"id": "a", "category": "count", "messages": [{"role": "system", "content": "Be brief."}, USER]},
        "",
        {"prompt": "def f(", "category": None},
        {"id": "c", "prompt_ids": [1, 2]},
        {"turns": ["first", "second"], "reference": "ignored"},
    )
    assert read_prompts(path) == [
        Prompt(id="a", category="count", messages=({"role": "system", "content": "Be brief."}, USER)),
        Prompt(id="line-0003", category=None, text="def f("),
        Prompt(id="c", category=None, token_ids=(1, 2)),
        Prompt(id="line-0005", category=None, messages=({"role": "user", "content": "first"},)),
    ]


def test_line_ends_of_other_kinds_inside_a_text_do_not_cut_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\r\n'.encode())
    assert [(prompt.id, prompt.text) for prompt in read_prompts(path)] == [("line-0001", "a\u2028b\x85c"), ("line-0002", "d")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("[1]", "JSON object was expected, not list"),
        ({"id": "x"}, "exactly one of .* found none"),
        ({"prompt": "a", "messages": [USER]}, "found messages, prompt"),
        ({"prompt": 3}, "prompt must be a non-empty string"),
        ({"prompt": ""}, "prompt must be a non-empty string"),
        ({"prompt_ids": [1, -1]}, "prompt_ids must be"),
        ({"prompt_ids": [1, True]}, "prompt_ids must be"),
        ({"prompt_ids": []}, "prompt_ids must be"),
        ({"turns": []}, "turns must be"),
        ({"messages": []}, "messages must be a non-empty list"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content string"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "each message needs a role"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "nothing to answer"),
        ({"id": 7, "prompt": "a"}, "id must be a non-empty string"),
        ({"category": "", "prompt": "a"}, "category must be a non-empty string"),
        ({"id": "first", "prompt": "a"}, "'first' was used on line 1"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path: Path, line: Any, message: str) -> None:
    path = _file(tmp_path, {"id": "first", "prompt": "fine"}, line)
    with pytest.raises(InputError, match=rf"p\.jsonl:2: .*{message}"):
        read_prompts(path)


def test_an_empty_a_missing_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no prompts"):
        read_prompts(_file(tmp_path, "", " "))
    with pytest.raises(InputError, match="Not found"):
        read_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        read_prompts(tmp_path / "p.jsonl")


def test_messages_go_through_the_template_with_the_generation_prompt(tokenizer: Any) -> None:
    rendered = _one(Prompt(id="a", category="count", messages=(USER,)), tokenizer)
    assert rendered.text == f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.token_ids == (
        1, 88, 86, 278, 202, 420, 462, 425, 224, 20, 20, 279, 224, 22, 22, 423, 224, 21, 17, 2, 202,
        1, 443, 76, 86, 87, 312, 87, 202,
    )  # fmt: skip
    assert (rendered.id, rendered.category) == ("a", "count")


def test_raw_text_and_ids_bypass_the_template(tokenizer: Any) -> None:
    raw = _one(Prompt(id="a", category=None, text="Count up"), tokenizer)
    ids = _one(Prompt(id="b", category=None, token_ids=raw.token_ids), tokenizer)
    assert raw.text == "Count up"
    assert ids.token_ids == raw.token_ids
    assert ids.text == "Count up"


def test_a_tokenizer_without_template_serves_raw_text_only(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    assert _one(Prompt(id="a", category=None, text="Count"), tokenizer).token_ids
    with pytest.raises(InputError, match=r"Prompt b has messages, but .* no chat template"):
        _one(Prompt(id="b", category=None, messages=(USER,)), tokenizer)


def test_a_prompt_longer_than_the_target_is_named_with_both_lengths(tokenizer: Any) -> None:
    prompt = Prompt(id="long", category=None, token_ids=(5,) * 12)
    assert len(_one(prompt, tokenizer, max_prompt_tokens=12).token_ids) == 12
    with pytest.raises(InputError, match="Prompt long has 12 tokens; the target has room for 11"):
        _one(prompt, tokenizer, max_prompt_tokens=11)


def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"token id 512; .* ends at 511"):
        _one(Prompt(id="a", category=None, token_ids=(511, 512)), tokenizer)


def test_thinking_is_given_to_the_template_and_is_part_of_its_digest(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="no enable_thinking"):
        _one(Prompt(id="a", category=None, messages=(USER,)), tokenizer, thinking=True)
    plain = template_digest(tokenizer, thinking=None)
    tokenizer.chat_template = THINKING_TEMPLATE
    prompt = Prompt(id="a", category=None, messages=(USER,))
    assert _one(prompt, tokenizer, thinking=False).text == "<no>" + USER["content"]
    assert _one(prompt, tokenizer, thinking=True).text == USER["content"]
    assert _one(prompt, tokenizer, thinking=None).text == USER["content"]
    digests = [template_digest(tokenizer, thinking=mode) for mode in (None, False, True)]
    assert len({plain, *digests}) == 4


def test_a_template_that_refuses_names_the_prompt(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(InputError, match="refused prompt a: no system role"):
        _one(Prompt(id="a", category=None, messages=(USER,)), tokenizer)


def test_a_template_that_prints_the_date_renders_the_same_every_day(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}"
    assert _one(Prompt(id="a", category=None, messages=(USER,)), tokenizer).text == "01 Jan 2025"


def test_a_template_that_renders_nothing_is_an_empty_prompt(tokenizer: Any) -> None:
    tokenizer.chat_template = "{# nothing #}"
    with pytest.raises(InputError, match="Prompt a is empty"):
        _one(Prompt(id="a", category=None, messages=(USER,)), tokenizer)


def test_a_directory_without_tokenizer_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)


def test_the_demo_prompts_are_thirty_in_six_categories_and_encode_losslessly(tokenizer: Any) -> None:
    prompts = read_prompts(DEMO_PROMPTS)
    counts: dict[str | None, int] = {}
    for prompt in prompts:
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
    assert counts == {"code": 5, "math": 5, "count": 5, "story": 5, "record": 5, "unlike": 5}
    for rendered in render(prompts, tokenizer, thinking=None, max_prompt_tokens=100):
        assert tokenizer.decode(list(rendered.token_ids)) == rendered.text
