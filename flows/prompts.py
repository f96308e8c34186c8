"""`dflash-eval prompts show` and `prompts load`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.prompt_views import Edge, PromptsView

EDGE_TOKENS = 40


def show(prompts: Path, target: str, *, hosts: Path | None, home: Path, thinking: bool | None, ids: list[str], first: int) -> int:
    """Print head and tail of the rendered prompts. Raises EvalError."""
    from tasks.prompt_views import view_prompts
    from tasks.remote.site import open_site

    site = open_site(str(home), str(hosts.resolve()) if hosts else None)
    name, colon, path = target.partition(":")
    try:
        known = colon and name in {entry.name for entry in site.inventory.hosts}
        host, where = (site.host(name), path) if known else (None, str(Path(target).expanduser().absolute()))
        view = view_prompts(prompts, host, where, thinking=thinking, ids=ids, first=first, edge=EDGE_TOKENS)
    finally:
        site.close()
    print("\n".join(_lines(view)))
    return 0


def load(name: str, path: Path, *, source: Path | None, revision: str | None, limit: int | None) -> int:
    """Write a published set to a file. Raises EvalError."""
    from tasks.prompt_views import write_prompt_set

    count = write_prompt_set(name, path, source=source, revision=revision, limit=limit)
    first_turn = ", the first turn of each" if name == "mt-bench" else ""
    print(f"{count} prompts of {name}{first_turn}, written to {path}")
    return 0


def _lines(view: PromptsView) -> list[str]:
    thinking = {None: "the template's own default", True: "on", False: "off"}[view.thinking]
    lines = [
        f"{view.count} prompts, {view.tokens} tokens",
        f"chat template with thinking mode: sha256 {view.template_digest}",
        f"thinking: {thinking}",
    ]
    for prompt in view.prompts:
        category = f", {prompt.category}" if prompt.category else ""
        lines += ["", f"{prompt.id}{category}: {prompt.tokens} tokens"]
        lines += _edge("all " if prompt.tail is None else "head", prompt.head)
        lines += _edge("tail", prompt.tail) if prompt.tail is not None else []
    if len(view.prompts) < view.count:
        lines += ["", f"{view.count - len(view.prompts)} more; --id ID or --first N shows others"]
    return lines


def _edge(name: str, edge: Edge) -> list[str]:
    return [f"  {name}  {' '.join(map(str, edge.token_ids))}", f"        {edge.text!r}"]
