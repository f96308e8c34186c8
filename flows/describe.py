"""`dflash-eval describe`: what a checkpoint is, field by field, and where each value comes from."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path, PurePosixPath
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_model.errors import InputError
from dflash_model.storage import write_file
from flows.running import FILE_WIDTH
from tasks.configs import OPTIONS
from tasks.describing import LookedAt, look_at, writable_config
from tasks.remote.inventory import RELAY
from tasks.remote.site import open_site

_MARKS = {"read": "read", "inferred": "[yellow]inferred[/yellow]", "given": "[cyan]given[/cyan]"}


def run(options: argparse.Namespace, *, home: Path) -> int:
    """Describe the checkpoint; write a config where asked. Raises EvalError."""
    found = _look(options, home)
    if options.write_config is not None:
        _write_config(found, options.write_config)
    if options.json:
        print(json.dumps(found.description, indent=1, ensure_ascii=False))
        return 0
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=FILE_WIDTH)  # whole rows, for a file or a pipe
    show(found, console)
    if options.write_config is not None:
        console.print(f"Wrote {escape(str(options.write_config))}.", highlight=False, soft_wrap=True)
    return 0


def _look(options: argparse.Namespace, home: Path) -> LookedAt:
    site = open_site(str(home), str(options.hosts.resolve()) if options.hosts else None)
    try:
        host, colon, path = options.checkpoint.partition(":")
        if not colon or host not in [entry.name for entry in site.inventory.hosts]:
            host, path = RELAY, str(Path(options.checkpoint).expanduser().absolute())
        config = None
        if options.config is not None:
            config = PurePosixPath(Path(options.config).expanduser().absolute())
        chosen = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
        return look_at(
            site.host(host), path, config=config, options=chosen, config_host=site.host(RELAY), state_key=options.state_key
        )
    finally:
        site.close()


def _write_config(found: LookedAt, path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} is there already.", "Name a new file; no config is ever overwritten.")
    content = json.dumps(writable_config(found.reading.spec), indent=2) + "\n"
    write_file(path.absolute(), content.encode())


def show(found: LookedAt, console: Console) -> None:
    """The description for people: headline, one row a field, warnings."""
    said = found.description
    console.print(f"[bold]{escape(said['headline'])}[/bold]", highlight=False, soft_wrap=True)
    where = f"{said['host']}:{said['path']}" if said["host"] != RELAY else said["path"]
    sizes = f"{said['tensors']} tensors, {said['weights_bytes'] / 1e6:.1f} of {said['checkpoint_bytes'] / 1e6:.1f} MB"
    step = f", step {said['step']}" if said["step"] is not None else ""
    console.print(escape(f"{where} ({said['format']}, {sizes}{step})"), highlight=False, soft_wrap=True)
    console.print()
    console.print(_table(found))
    neutral = [row.name for row in found.rows if row.neutral]
    if neutral:
        console.print(f"\nNot stated, and without effect so: {', '.join(neutral)}.", highlight=False)
    if said["unread_keys"]:
        console.print(f"Keys of the config that nothing reads: {escape(', '.join(said['unread_keys']))}.", highlight=False)
    for name, why in _dropped(said["dropped"]).items():
        console.print(f"Left out: {escape(name)} ({escape(why)}).", highlight=False)
    for what in said["unsupported"]:
        console.print(f"[red]cannot be run yet[/red]: {escape(what)}", highlight=False)
    for warning in said["warnings"]:
        console.print(f"[yellow]warning[/yellow]: {escape(warning)}", highlight=False)


def _table(found: LookedAt) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("field", "value", "", "from"):
        table.add_column(column, overflow="fold")
    for row in found.rows:
        if not row.neutral:
            table.add_row(row.name, escape(row.words), _MARKS[row.origin], f"[dim]{escape(row.place)}[/dim]")
    return table


def _dropped(dropped: dict[str, Any]) -> dict[str, str]:
    """Reason by reason: up to three names, and how many more."""
    names: dict[str, list[str]] = {}
    for name, why in dropped.items():
        names.setdefault(why, []).append(name)
    return {", ".join(some[:3]) + (f" and {len(some) - 3} more" if len(some) > 3 else ""): why for why, some in names.items()}
