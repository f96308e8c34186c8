"""Prompt sets: JSONL in, token ids out. Everything after this file compares token ids, never text.

A line holds exactly one of `messages` (rendered with the target's chat template), `prompt` (raw text, no template),
`prompt_ids` (used as they are) or `turns` (a list of user turns, of which the first is used), and optionally `id` and
`category`. Other keys are ignored.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from dflash_model.digests import json_digest
from dflash_model.errors import ConfigError, InputError, from_os_error

log = logging.getLogger(__name__)

FIELDS = ("messages", "prompt", "prompt_ids", "turns")
ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_DATE = datetime(2025, 1, 1)
"""What a template that prints today's date is given: a prompt that changes at midnight would void every reference."""
_DATE_CALL = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One line of a prompt set; exactly one of `messages`, `text` and `token_ids` is set."""

    id: str
    """Unique in its set; `line-0003` for the third line where the file gives none."""

    category: str | None
    """The file's own label, or None."""

    messages: tuple[dict[str, str], ...] | None = None
    """Chat messages {role, content}, for the chat template."""

    text: str | None = None
    """Raw text, tokenised without a template."""

    token_ids: tuple[int, ...] | None = None
    """Token ids, used as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedPrompt:
    """A prompt as the target sees it."""

    id: str
    """The prompt's id."""

    category: str | None
    """The prompt's category."""

    token_ids: tuple[int, ...]
    """What the target is given."""

    text: str
    """The rendered text (for `prompt_ids`: decoded), to be shown to people."""


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of one JSONL file, in order; blank lines are skipped.

    Raises InputError naming file and line for bad JSON, a missing or doubled field, a wrong type, a duplicate id; and for
    a file that is missing, not UTF-8 or empty.
    """
    try:
        # Not splitlines(): that also cuts at U+2028 and others, which may stand inside a JSON string.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as exc:
        raise from_os_error(exc, f"reading the prompts in {path}") from exc
    except UnicodeDecodeError as exc:
        raise InputError(f"{path} is not UTF-8: {exc}.", "Save the prompts as UTF-8.") from exc
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(json.loads(line), number)
            if prompt.id in seen:
                raise ValueError(f"the id {prompt.id!r} was used on line {seen[prompt.id]} already")
        except (ValueError, TypeError) as exc:
            raise InputError(
                f"{path}:{number}: {exc}.", "Mend that line; the format is described in the documentation of prompts."
            ) from exc
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{path} holds no prompts.", "Give a JSONL file with one prompt a line.")
    return prompts


def load_tokenizer(directory: Path) -> Any:
    """The target's own tokenizer (transformers), from local files only. Raises InputError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as exc:
        raise InputError(
            f"{directory} has no tokenizer that can be loaded: {exc}.", "Copy the target's tokenizer files there."
        ) from exc


def template_digest(tokenizer: Any, *, thinking: bool | None) -> str:
    """sha256 over the chat template's text and the thinking mode: one part of a reference's identity."""
    return json_digest({"template": _template(tokenizer), "thinking": thinking})


def render(prompts: Sequence[Prompt], tokenizer: Any, *, thinking: bool | None, max_prompt_tokens: int) -> list[RenderedPrompt]:
    """Token ids of each prompt, `messages` through the chat template with the generation prompt added.

    `thinking` is given to the template as `enable_thinking` (None: not given). Raises InputError for a tokenizer without
    a template, a template that refuses, an id outside the vocabulary, an empty prompt, or one of more than
    `max_prompt_tokens`; ConfigError where thinking is wanted and the template does not know it.
    """
    template = _template(tokenizer)
    if thinking and "enable_thinking" not in (template or ""):
        raise ConfigError("thinking is on, but the target's chat template has no enable_thinking.", "Leave `thinking` unset.")
    rendered = []
    for prompt in prompts:
        token_ids, text = _encode(prompt, tokenizer, template, thinking=thinking)
        if not token_ids:
            raise InputError(f"Prompt {prompt.id} is empty.", "Remove it, or give it text.")
        if len(token_ids) > max_prompt_tokens:
            raise InputError(
                f"Prompt {prompt.id} has {len(token_ids)} tokens; the target has room for {max_prompt_tokens}.",
                "Shorten or remove it, or ask for fewer new tokens.",
            )
        rendered.append(RenderedPrompt(id=prompt.id, category=prompt.category, token_ids=token_ids, text=text))
    return rendered


def _parse(data: Any, number: int) -> Prompt:
    """One line's value as a Prompt; ValueError or TypeError with a phrase that says what is wrong."""
    if not isinstance(data, dict):
        raise TypeError(f"a JSON object was expected, not {type(data).__name__}")
    given = [name for name in FIELDS if name in data]
    if len(given) != 1:
        raise ValueError(f"exactly one of {', '.join(FIELDS)} is needed, found {', '.join(given) or 'none'}")
    labels: dict[str, str | None] = {}
    for name in ("id", "category"):
        value = data.get(name)
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{name} must be a non-empty string, not {value!r}")
        labels[name] = value
    prompt_id, category = labels["id"] or f"line-{number:04d}", labels["category"]
    value = data[given[0]]
    if given[0] == "messages":
        return Prompt(id=prompt_id, category=category, messages=_messages(value))
    if given[0] == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) for turn in value):
            raise ValueError("turns must be a non-empty list of strings")
        return Prompt(id=prompt_id, category=category, messages=({"role": "user", "content": value[0]},))
    if given[0] == "prompt":
        if not isinstance(value, str) or not value:
            raise ValueError("prompt must be a non-empty string")
        return Prompt(id=prompt_id, category=category, text=value)
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise ValueError("prompt_ids must be a non-empty list of token ids")
    return Prompt(id=prompt_id, category=category, token_ids=tuple(value))


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("messages must be a non-empty list")
    messages = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str) or message.get("role") not in ROLES:
            raise ValueError(f"each message needs a role ({', '.join(ROLES)}) and a content string")
        messages.append({"role": message["role"], "content": message["content"]})
    if messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's, so there is nothing to answer")
    return tuple(messages)


def _template(tokenizer: Any) -> str | None:
    """The chat template that a conversation without tools is rendered with, or None."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) and template else None


def _encode(prompt: Prompt, tokenizer: Any, template: str | None, *, thinking: bool | None) -> tuple[tuple[int, ...], str]:
    if prompt.token_ids is not None:
        foreign = [token for token in prompt.token_ids if token >= len(tokenizer)]
        if foreign:
            raise InputError(
                f"Prompt {prompt.id} holds the token id {foreign[0]}; the target's vocabulary ends at {len(tokenizer) - 1}.",
                "Tokenise the prompt with the target's own tokenizer.",
            )
        return prompt.token_ids, tokenizer.decode(list(prompt.token_ids))
    if prompt.text is not None:
        return tuple(tokenizer(prompt.text)["input_ids"]), prompt.text
    if template is None:
        raise InputError(
            f"Prompt {prompt.id} has messages, but the target's tokenizer has no chat template.",
            "Add chat_template.jinja to the target's directory, or give `prompt` or `prompt_ids`.",
        )
    text = _rendered_text(prompt, tokenizer, template, thinking=thinking)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), text


def _rendered_text(prompt: Prompt, tokenizer: Any, template: str, *, thinking: bool | None) -> str:
    options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    dated = _DATE_CALL.sub(lambda call: repr(TEMPLATE_DATE.strftime(call["format"])), template)
    if dated != template:
        log.info("prompt %s: the chat template prints today's date; it is given %s", prompt.id, TEMPLATE_DATE.date())
    try:
        text: str = tokenizer.apply_chat_template(
            list(prompt.messages or ()), chat_template=dated, add_generation_prompt=True, tokenize=False, **options
        )
    except (TemplateError, ValueError, TypeError) as exc:
        raise InputError(
            f"The chat template refused prompt {prompt.id}: {exc}.", "Change its messages to what the template allows."
        ) from exc
    return text
