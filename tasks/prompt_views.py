"""Prompts as people look at them before a night is spent on them: rendered head and tail, template, thinking mode."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dflash_model.errors import InputError
from dflash_model.storage import write_file
from dflash_model.target.fingerprint import TEXT_FILES
from dflash_model.target.model_directory import CONFIG_NAME
from dflash_model.target.prompt_sets import SETS, prompt_lines
from dflash_model.target.prompts import load_tokenizer, read_prompts, render, template_digest
from tasks.remote.host import Host

NO_LIMIT = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """A run of tokens of a rendered prompt."""

    token_ids: tuple[int, ...]
    """Its ids."""

    text: str
    """What they decode to, special tokens included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptView:
    """One rendered prompt."""

    id: str
    """The prompt's id."""

    category: str | None
    """The prompt's category."""

    tokens: int
    """Its length."""

    head: Edge
    """Its first tokens; the whole prompt where it is short."""

    tail: Edge | None
    """Its last tokens; None where `head` is all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsView:
    """A prompt file under one target."""

    template_digest: str
    """sha256 of chat template and thinking mode: part of the references' identity."""

    thinking: bool | None
    """As given to the template; None: the template's own default."""

    count: int
    """Prompts in the file."""

    tokens: int
    """Of all of them."""

    prompts: tuple[PromptView, ...]
    """Those that were asked for."""


def view_prompts(
    path: Path, host: Host | None, target: str, *, thinking: bool | None, ids: Sequence[str], first: int, edge: int
) -> PromptsView:
    """Render all prompts of `path` with the target's tokenizer and show some: those in `ids`, else the `first` ones.

    `host` None: `target` is a directory here; else its small text files are read from that host. Raises InputError.
    """
    prompts = read_prompts(path)
    unknown = sorted(set(ids) - {prompt.id for prompt in prompts})
    if unknown:
        raise InputError(f"{path} has no prompt {unknown[0]!r}.", f"Its first ids: {', '.join(p.id for p in prompts[:5])}.")
    with _tokenizer_files(host, target) as directory:
        tokenizer = load_tokenizer(directory)
        rendered = render(prompts, tokenizer, thinking=thinking, max_prompt_tokens=NO_LIMIT)
        shown = [prompt for prompt in rendered if prompt.id in ids] if ids else rendered[:first]

        def cut(token_ids: tuple[int, ...]) -> Edge:
            return Edge(token_ids=token_ids, text=tokenizer.decode(list(token_ids), skip_special_tokens=False))

        views = [
            PromptView(
                id=prompt.id,
                category=prompt.category,
                tokens=len(prompt.token_ids),
                head=cut(prompt.token_ids if len(prompt.token_ids) <= 2 * edge else prompt.token_ids[:edge]),
                tail=cut(prompt.token_ids[-edge:]) if len(prompt.token_ids) > 2 * edge else None,
            )
            for prompt in shown
        ]
        return PromptsView(
            template_digest=template_digest(tokenizer, thinking=thinking),
            thinking=thinking,
            count=len(rendered),
            tokens=sum(len(prompt.token_ids) for prompt in rendered),
            prompts=tuple(views),
        )


def write_prompt_set(name: str, path: Path, *, source: Path | None, revision: str | None, limit: int | None) -> int:
    """Write a published set to a new JSONL file; how many prompts it has. Raises EvalError."""
    if path.exists():
        raise InputError(f"{path} exists already.", "Evaluations may rest on it: give another name, or remove it first.")
    lines = prompt_lines(name, source=source, revision=revision, limit=limit)
    write_file(path, ("\n".join(lines) + "\n").encode())
    return len(lines)


def prompt_set_names() -> tuple[str, ...]:
    """Sets that can be written."""
    return tuple(SETS)


@contextmanager
def _tokenizer_files(host: Host | None, target: str) -> Iterator[Path]:
    """A directory here with the target's tokenizer and template, for the body's duration."""
    if host is None:
        yield Path(target)
        return
    with tempfile.TemporaryDirectory(prefix="dflash-eval-") as copy:
        for name in (CONFIG_NAME, *TEXT_FILES):
            there = PurePosixPath(target) / name
            if host.stat(there) is not None:
                write_file(Path(copy) / name, b"".join(host.read_blocks(there)))
        yield Path(copy)
