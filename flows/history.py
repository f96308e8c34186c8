"""Looking back: `history`, `trend`, `compare` and `schema`. They read finished evaluations and compute nothing heavy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_model.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from dflash_model.evaluations import Evaluation
    from dflash_model.trend import Trend

BAR_WIDTH = 40
_NAMED_RUNS = 5


def add_history_commands(commands: Any, add_home: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the four commands to the command line's parser."""
    history = commands.add_parser("history", help="finished evaluations, the newest first")
    history.add_argument("--limit", type=int, default=20, help="how many (default: %(default)s)")
    trend = commands.add_parser(
        "trend",
        help="tau over the steps of a training run",
        description="Tau over the steps of a training run: the checkpoints of one directory, as they were last evaluated, on the "
        "ground (target, prompts, template, references, tail rule, fidelity) of the newest evaluation.",
    )
    trend.add_argument(
        "training_run", nargs="?", metavar="HOST:DIR", help="directory of the checkpoints; none: that of the newest evaluation"
    )
    compare = commands.add_parser(
        "compare",
        help="one finished evaluation's drafter against another's, on the prompts that both have",
        description="A minus B, from what two finished evaluations kept of each request; nothing is computed anew. RUN is a name "
        "below HOME/runs, `latest`, or a directory; DRAFTER is needed where a run has several candidates.",
    )
    compare.add_argument("a", metavar="RUN[:DRAFTER]")
    compare.add_argument("b", metavar="RUN[:DRAFTER]")
    for command, function in ((history, _history), (trend, _trend), (compare, _compare)):
        command.add_argument("--json", action="store_true", help="for machines")
        add_home(command)
        command.set_defaults(run=function)
    schema = commands.add_parser("schema", help="print the JSON Schema of result.json")
    schema.set_defaults(run=_schema)


def home_of(options: argparse.Namespace) -> Path:
    """--home, or the default."""
    from tasks.remote.site import default_home

    return options.home.expanduser().resolve() if options.home else default_home()


def _history(options: argparse.Namespace) -> int:
    from rich.console import Console

    from dflash_model.history import evaluations, unreadable

    home = home_of(options)
    found = evaluations(home)
    shown = found[::-1][: options.limit]
    if options.json:
        _print_json([_evaluation_json(one) for one in shown])
        return 0
    console = Console()
    if not shown:
        console.print(f"There is no finished evaluation below {home / 'runs'}.", soft_wrap=True, highlight=False)
    else:
        console.print(history_table(shown))
        for letter, words in _other_grounds(shown).items():
            console.print(f"ground {letter}: {words}", highlight=False, soft_wrap=True)
        if len(found) > len(shown):
            console.print(f"{len(found) - len(shown)} more; --limit shows them.", highlight=False)
    for run_id, problem in unreadable(home).items():
        console.print(f"left out: {run_id}: {problem}", highlight=False, soft_wrap=True)
    return 0


def history_table(shown: list[Evaluation]) -> Table:
    """A row a drafter of each evaluation; rows of one ground letter may be compared."""
    from rich.table import Table
    from rich.text import Text

    from dflash_model.figures import interval, number, signed
    from dflash_model.table import VERDICT_STYLES

    letters = _letters(shown)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title, justify in (("finished", "left"), ("run", "left"), ("drafter", "left"), ("step", "right"), ("tau", "right")):
        table.add_column(title, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for title, justify in (("difference", "right"), ("verdict", "left"), ("prompts", "right"), ("ground", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for one in shown:
        for number_of, drafter in enumerate(one.drafters):
            first = number_of == 0
            verdict = drafter.verdict or ("reference" if drafter.role == "reference" else "–")
            table.add_row(
                one.finished_at[:16].replace("T", " ") if first else "",
                Text(one.run_id if first else ""),
                Text(drafter.name),
                str(drafter.step) if drafter.step is not None else "–",
                f"{number(drafter.tau)} {interval(drafter.interval)}".rstrip(),
                signed(drafter.difference),
                Text(verdict, style=VERDICT_STYLES[verdict]),
                str(one.prompts) if first else "",
                letters[one.run_id] if first else "",
            )
    return table


def _letters(shown: list[Evaluation]) -> dict[str, str]:
    """Run -> letter of its ground, A for the newest."""
    grounds: list[Any] = []
    for one in shown:
        if one.ground not in grounds:
            grounds.append(one.ground)
    return {one.run_id: chr(ord("A") + min(grounds.index(one.ground), 25)) for one in shown}


def _other_grounds(shown: list[Evaluation]) -> dict[str, str]:
    """Letter -> in which way that ground differs from A's."""
    letters, first = _letters(shown), shown[0].ground
    return {
        letters[one.run_id]: ", ".join(first.differences(one.ground)) + "; not comparable with A"
        for one in shown
        if one.ground != first
    }


def _trend(options: argparse.Namespace) -> int:
    from rich.console import Console

    from dflash_model.history import evaluations
    from dflash_model.trend import training_runs, trend_of

    found = evaluations(home_of(options))
    known = training_runs(found)
    chosen = options.training_run.rstrip("/") if options.training_run else next(iter(known), None)
    trend = trend_of(found, chosen) if chosen is not None else None
    if trend is None:
        raise InputError(
            f"No checkpoint of {chosen} was evaluated." if chosen else "There is no finished evaluation of a training run.",
            f"Name one of: {', '.join(known[:_NAMED_RUNS])}." if known else "Run an evaluation first.",
        )
    if options.json:
        _print_json(_trend_json(trend))
        return 0
    console = Console()
    console.print(f"[bold]{trend.training_run}[/bold]", highlight=False, soft_wrap=True)
    console.print(trend_table(trend))
    for words, count in trend.left_out.items():
        console.print(f"left out: {count} evaluation{'s' if count > 1 else ''} with {words}", highlight=False, soft_wrap=True)
    return 0


def trend_table(trend: Trend) -> Table:
    """A row a checkpoint: step, tau with interval, a bar from 1 to the best, the verdict against the evaluation's reference."""
    from rich.table import Table
    from rich.text import Text

    from dflash_model.figures import interval, number
    from dflash_model.table import VERDICT_STYLES

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title, justify in (("step", "right"), ("drafter", "left"), ("tau", "right"), ("", "left"), ("verdict", "left")):
        table.add_column(title, justify=justify, no_wrap=title == "")  # type: ignore[arg-type]
    top = trend.best.drafter.tau if trend.best is not None and trend.best.drafter.tau is not None else 1.0
    for point in trend.points:
        drafter = point.drafter
        filled = round(BAR_WIDTH * ((drafter.tau or 1.0) - 1) / max(top - 1, 1e-9)) if drafter.tau is not None else 0
        bar = Text("█" * filled, style="green" if point == trend.best else "cyan")
        if point == trend.best:
            bar.append(" best")
        verdict = drafter.verdict or "–"
        table.add_row(
            str(drafter.step) if drafter.step is not None else "–",
            Text(drafter.name),
            f"{number(drafter.tau)} {interval(drafter.interval)}".rstrip(),
            bar,
            Text(verdict, style=VERDICT_STYLES[verdict]),
        )
    return table


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from dflash_model.evaluations import Ground, read_result, request_totals
    from dflash_model.gate import compare_results

    home = home_of(options)
    (left, ours), (right, theirs) = (_chosen(text, home) for text in (options.a, options.b))
    results = read_result(left), read_result(right)
    names = [request_totals(result, drafter)[0] for result, drafter in zip(results, (ours, theirs), strict=True)]
    differences = Ground.of(results[0]).differences(Ground.of(results[1]))
    if any(not words.startswith("fidelity") for words in differences):
        raise InputError(
            f"{left.name} and {right.name} cannot be compared: {right.name} has {', '.join(differences)}.",
            "Evaluate both on the same target, prompts and references, with the same tail rule.",
        )
    compared = compare_results(results[0], names[0], results[1], names[1])
    if options.json:
        difference = compared.difference
        spread = difference.spread if difference is not None else None
        _print_json(
            {
                "a": {"run": left.name, "drafter": names[0]},
                "b": {"run": right.name, "drafter": names[1]},
                "differs": differences,
                "prompts": difference.prompts if difference is not None else 0,
                "difference": difference.value if difference is not None else None,
                "relative_difference": difference.relative if difference is not None else None,
                "interval": spread.interval if spread is not None else None,
                "p_value": spread.p_value if spread is not None else None,
                "verdict": compared.verdict.word,
                "further_prompts": compared.verdict.further_prompts,
                "sentence": compared.verdict.sentence,
            }
        )
        return 0
    console = Console()
    console.print(compared.verdict.sentence, highlight=False, soft_wrap=True)
    for words in differences:
        console.print(f"Mind: {right.name} has {words}.", highlight=False, soft_wrap=True)
    return 0


def _chosen(text: str, home: Path) -> tuple[Path, str | None]:
    """(directory, drafter) of RUN[:DRAFTER]. Raises InputError where there is no such run."""
    run, _, drafter = text.partition(":")
    for directory in (home / "runs" / run, Path(run).expanduser()):
        if directory.is_dir() and run:
            return directory.resolve(), drafter or None
    runs = sorted(path.parent.name for path in (home / "runs").glob("*/result.json"))[-_NAMED_RUNS:]
    raise InputError(f"There is no run {run} below {home / 'runs'}.", f"Name one of: {', '.join(runs) or 'none yet'}.")


def _schema(_options: argparse.Namespace) -> int:
    from dflash_model.result import result_schema

    _print_json(result_schema())
    return 0


def _evaluation_json(one: Evaluation) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(one)


def _trend_json(trend: Trend) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(trend) | {"best": trend.best.drafter.digest if trend.best is not None else None}


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    print()
