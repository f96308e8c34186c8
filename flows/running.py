"""Running one evaluation from the command line: from options to parameters, the flow with a terminal, the closing table."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_model.errors import Cancelled, EvalError, InputError, Regressed
from flows.environment import hand_over, prepare, quiet_console
from flows.server import prefect_server

if TYPE_CHECKING:
    from flows.parameters import EngineStates, EvaluateParameters
    from flows.plan import PlanRow


FILE_WIDTH = 160


def run_or_plan(make_parameters: Callable[[], EvaluateParameters], home: Path, *, plan: bool) -> int:
    """Run or plan the evaluation that `make_parameters` describes; returns the exit code. Raises EvalError."""
    prepare(home)
    from pydantic import ValidationError

    try:
        parameters = make_parameters()
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        problem = f"{where}: {first['msg']}." if where else f"{first['msg'].removeprefix('Value error, ')}."
        raise InputError(problem, "Correct that option; `dflash-eval run --help` lists them.") from exc
    if plan:
        _print_plan(parameters)
    else:
        run(parameters)
    return 0


def run(parameters: EvaluateParameters) -> dict[str, Any]:
    """Run the flow in this process, show it on the terminal, print the verdict. Raises EvalError."""
    with prefect_server(Path(os.environ["PREFECT_HOME"]) / "server.log"):
        try:
            return run_on_server(parameters)
        finally:
            hand_over()


def run_on_server(parameters: EvaluateParameters) -> dict[str, Any]:
    """`run` on the Prefect server that is there already."""
    from flows.evaluate import evaluate, place_of
    from flows.signals import end_on_signals
    from flows.terminal import Terminal
    from tasks.events import listening
    from tasks.remote.processes import allow_children

    place = place_of(parameters)
    parameters = parameters.model_copy(update={"run_id": place.run_id, "home": place.home})
    quiet_console(place.directory / "logs" / "flow.log")
    allow_children()
    end_on_signals()
    console = _console()
    console.print(f"Evaluation [bold]{place.run_id}[/bold]")
    try:
        with Terminal(console) as terminal, listening(terminal):
            outcome = evaluate(parameters)
    except EvalError as exc:
        if isinstance(exc, Regressed):
            print_outcome(console, place.directory)
        console.print(f"Log: {place.directory / 'logs'}", soft_wrap=True)
        raise exc.with_traceback(None) from None
    except KeyboardInterrupt:
        raise Cancelled("Interrupted; every stage program has ended.", f"`dflash-eval rerun {place.run_id}` goes on.") from None
    assert isinstance(outcome, dict)
    print_outcome(console, place.directory)
    return outcome


def _console() -> Console:
    """A terminal as wide as it is; into a file or pipe as wide as the whole table needs."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=FILE_WIDTH)


def print_outcome(console: Console, directory: Path) -> None:
    """The table, the verdicts and the account of the finished run in `directory`."""
    from dflash_model.evaluations import read_result, read_run
    from dflash_model.table import drafter_table
    from tasks.publish import REPORT_FILE, RESULT_FILE

    result, run = read_result(directory), read_run(directory)
    console.print()
    console.print(drafter_table(result, width=console.width))
    for drafter in result["drafters"]:
        against = drafter.get("vs_reference")
        if against:
            console.print(f"[bold]{drafter['name']}[/bold]: {against['sentence']}", highlight=False, soft_wrap=True)
        for warning in drafter.get("warnings", ()):
            console.print(
                f"[yellow]warning[/yellow]: {escape(drafter['name'])}: {escape(warning)}", highlight=False, soft_wrap=True
            )
    for note in result.get("references", {}).get("notes", []):
        console.print(escape(note), highlight=False, soft_wrap=True)
    for sentence in run["gate"]["not_applied"]:
        console.print(f"Gate: {sentence}", highlight=False, soft_wrap=True)
    ran = sum(stage["state"] == "ran" for stage in run["stages"])
    console.print(f"\nStages: {ran} ran, {len(run['stages']) - ran} Cached.{_moved(run['stages'])}", highlight=False)
    console.print(f"Report: {directory / REPORT_FILE}", soft_wrap=True, highlight=False)
    console.print(f"Result: {directory / RESULT_FILE}", soft_wrap=True, highlight=False)


def _moved(stages: Sequence[Mapping[str, Any]]) -> str:
    """ " Checkpoints: moved 5.1 of 17.2 GB.", "" where no relay ran."""
    from tasks.events import moved_text

    relays = [stage for stage in stages if "moved_bytes" in stage]
    if not relays:
        return ""
    moved, whole = (sum(stage[name] for stage in relays) for name in ("moved_bytes", "source_bytes"))
    return f" Checkpoints: {moved_text(moved, whole)}."


def _print_plan(parameters: EvaluateParameters) -> None:
    from flows.evaluate import place_of
    from flows.pipeline import evaluate_with
    from flows.plan import PlanBook

    book = PlanBook(place_of(parameters))
    evaluate_with(book, parameters)
    table = Table(box=None, header_style="bold")
    for column, justify in (("stage", "left"), ("host", "left"), ("state", "left"), ("moves", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in book.rows:
        table.add_row(row.name, row.host, row.state, _moves(row))
    console = Console()
    console.print(table)
    known = sum(row.move_bytes or 0 for row in book.rows)
    open_rows = sum(row.move_bytes is None for row in book.rows)
    unknown = f" and what {open_rows} stages need of work that is not done yet" if open_rows else ""
    console.print(f"Would move {known / 1e6:.1f} MB{unknown}. Nothing was done.", highlight=False, soft_wrap=True)


def _moves(row: PlanRow) -> str:
    if row.move_bytes is None:
        return "-"
    return f"{row.move_bytes / 1e6:.1f} MB" if row.move_bytes else ""


def parameters_of_run(home: Path, options: argparse.Namespace) -> EvaluateParameters:
    """The parameters of an earlier run, with the options of `dflash-eval rerun`. Raises InputError where there is no such run.

    Failover is on again unless switched off anew: who runs again after a host died wants to get on.
    """
    from flows.parameters import REQUEST_FILE, EvaluateParameters  # not flows.evaluate: Prefect reads its settings when imported

    run_name = options.run_name
    path = home / "runs" / run_name / REQUEST_FILE
    if not path.is_file():
        runs = sorted(p.name for p in (home / "runs").glob("*") if (p / REQUEST_FILE).is_file())[-5:]
        raise InputError(f"There is no run {run_name} below {home / 'runs'}.", f"Name one of: {', '.join(runs) or 'none yet'}.")
    data = json.loads(path.read_text(encoding="utf-8"))
    changes = {"run_id": None, "redo_from": options.redo_from, "failover": options.failover}
    return EvaluateParameters.model_validate(data | changes | {"placement": data["placement"] | dict(options.place)})


def _engine(options: argparse.Namespace) -> EngineStates | None:
    """Where `--states-from` and `--engine-layer-ids` say that the states lie. Raises InputError for one without the other."""
    from flows.parameters import EngineStates

    if (options.states_from is None) != (options.engine_layer_ids is None):
        raise InputError("--states-from and --engine-layer-ids belong together.", "Give both, or neither.")
    if options.states_from is None:
        return None
    engine, _, path = options.states_from.partition(":")
    return EngineStates(engine=engine, path=path, layer_ids=options.engine_layer_ids)


def parameters_from_options(options: argparse.Namespace, home: Path) -> EvaluateParameters:
    """The parameters that the options of `dflash-eval run` mean."""
    from flows.parameters import BareConfig, EvaluateParameters, Gate, HiddenStates, Notify, References

    known = _host_names(options.hosts, home)
    return EvaluateParameters(
        home=str(home),
        inventory=str(options.hosts.resolve()) if options.hosts else None,
        candidates=[_drafter(text, known) for text in options.candidate],
        reference=_drafter(options.reference, known) if options.reference else None,
        target=_target(options.target, known),
        prompts=str(options.prompts.expanduser().resolve()),
        references=References(
            from_=options.references_from,
            url=options.server,
            model=options.server_model,
            concurrency=options.server_concurrency,
            timeout_s=options.server_timeout,
            api_key_file=options.server_key_file,
            max_new_tokens=options.max_new_tokens,
            dtype=options.dtype,
            thinking=options.thinking,
        ),
        hidden_states=HiddenStates(
            extraction=options.extraction,
            max_gpu_memory_gib=options.max_gpu_memory,
            batch=options.extraction_batch,
            engine=_engine(options),
            thresholds=dict(options.fidelity),
        ),
        bare=BareConfig(
            config_path=str(Path(options.config).expanduser().resolve()) if options.config else None,
            config_from_reference=options.config_from is not None,
            mask_token_id=options.mask_token_id,
            target_layer_ids=options.target_layer_ids,
            block_size=options.block_size,
            rope_theta=options.rope_theta,
            rms_norm_eps=options.rms_norm_eps,
            state_key=options.state_key,
        ),
        cast=options.cast,
        tail=options.tail,
        anchors=options.anchors,
        placement=dict(options.place),
        failover=options.failover,
        equal_within=options.equal_within,
        shards=options.shards,
        deadline_s=options.deadline,
        gpu_wait_s=options.gpu_wait,
        gate=Gate(
            worse_than_reference=options.fail_if_worse,
            worse_than_best=options.fail_if_worse_than_best,
            min_tau=options.min_tau,
            fidelity_pass=options.require_fidelity_pass,
        ),
        notify=Notify(on=options.notify, secret_block=options.webhook_block, link=options.report_link),
    )


def _host_names(hosts: Path | None, home: Path) -> tuple[str, ...]:
    from tasks.remote.site import open_site

    site = open_site(str(home), str(hosts.resolve()) if hosts else None)
    return tuple(entry.name for entry in site.inventory.hosts)


def _place(text: str, known: tuple[str, ...]) -> tuple[str | None, str]:
    """HOST:PATH where HOST is in the inventory, else a path of this machine."""
    host, colon, path = text.partition(":")
    if colon and host in known:
        return host, path
    return None, str(Path(text).expanduser().absolute())


def _drafter(text: str, known: tuple[str, ...]) -> Any:
    from flows.parameters import DrafterSource

    host, path = _place(text, known)
    return DrafterSource(host=host, path=path)


def _target(text: str, known: tuple[str, ...]) -> Any:
    from flows.parameters import TargetSource

    if text.startswith("hf:"):
        hub_id, _, revision = text.removeprefix("hf:").partition("@")
        return TargetSource(hub_id=hub_id, revision=revision or None)
    host, path = _place(text, known)
    return TargetSource(host=host, path=path)
