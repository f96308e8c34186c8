"""What a person sees while a run goes on: one line a finished stage, one live line for what is under way."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from tasks.events import Event, moving_text

BAR = 20


class Terminal:
    """Listens to a run's events. On a terminal it keeps a live line; into a file it writes finished stages only."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._running: dict[str, Event] = {}
        self._since: dict[str, float] = {}
        self._live = Live(console=console, refresh_per_second=8, transient=True, get_renderable=self._under_way)

    def __enter__(self) -> Terminal:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event.what == "started":
            self._running[event.stage], self._since[event.stage] = event, time.monotonic()
        elif event.what == "progress":
            self._running[event.stage] = event
        elif event.what == "note":
            self._console.print(f"  [dim]{escape(event.host)}: {escape(event.message)}[/dim]", soft_wrap=True)
        else:
            self._running.pop(event.stage, None)
            self._finished(event)

    def _finished(self, event: Event) -> None:
        mark = {"ran": "[green]done[/green]  ", "cached": "[cyan]Cached[/cyan]", "failed": "[red]failed[/red]"}[event.what]
        seconds = f"{event.seconds:7.1f} s" if event.what == "ran" else ""
        self._console.print(f"  {mark}  {escape(event.stage):<28} {escape(event.host):<8} {seconds}", highlight=False)

    def _under_way(self) -> Text:
        lines = [self._line(event) for event in list(self._running.values())]
        return Text("\n".join(lines))

    def _line(self, event: Event) -> str:
        waited = time.monotonic() - self._since.get(event.stage, time.monotonic())
        head = f"  ......  {event.stage:<28} {event.host:<8} {waited:7.1f} s"
        if not event.total:
            return head
        filled = BAR * event.done // event.total
        bar = f"{head}  {'#' * filled}{'.' * (BAR - filled)} {100 * event.done // event.total:3d} %  {amount(event)}"
        if event.unit == "bytes":
            return bar
        left = waited * (event.total - event.done) / event.done if event.done else 0.0
        return f"{bar}, about {left:.0f} s left"


def amount(event: Event) -> str:
    """ "12/30 prompts", or "1.2 of 3.0 GB, 41.0 MB/s, about 44 s left"."""
    if event.unit == "bytes":
        return moving_text(event.done, event.total, event.per_second)
    return f"{event.done}/{event.total} {event.unit}"
