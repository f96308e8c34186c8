"""The command line. Exit codes: 0 done, 2 the input must change, 3 a stage or host failed, 4 a gate's rule is broken (Regressed),
5 not evaluable, 130 interrupted.

Nothing heavy is imported here before it is needed: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_model import __version__
from dflash_model.errors import Cancelled, EvalError, InputError
from flows.history import add_history_commands, home_of
from flows.options import add_bare, add_home, add_placement, add_run, positive


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options) or 0)
    except EvalError as exc:
        _say_error(exc)
        return exc.exit_code
    except KeyboardInterrupt:
        _say_error(Cancelled("Interrupted.", "Run the same command again; finished work is kept."))
        return Cancelled.exit_code
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is still buffered must not be an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dflash-eval", description="Evaluate DFlash drafter checkpoints: tau, against a reference, and why."
    )
    parser.add_argument("--version", action="version", version=f"dflash-eval {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_run(commands, then=_run)
    _add_rerun(commands)
    _add_describe(commands)
    _add_hosts(commands)
    _add_prompts(commands)
    add_history_commands(commands, add_home)
    _add_bundle(commands)
    demo = commands.add_parser("demo", help="the whole evaluation on the bundled pair")
    demo.add_argument(
        "--directory", type=Path, default=Path(".demo"), help="where the demo's hosts and results lie (default: .demo)"
    )
    demo.set_defaults(run=_demo)
    serve = commands.add_parser("serve", help="serve the evaluation as a Prefect deployment with a nightly schedule")
    serve.add_argument("parameters", type=Path, help="JSON or YAML file with the parameters of an evaluation")
    serve.add_argument("--cron", default="0 3 * * *", help="when (default: %(default)s)")
    serve.add_argument("--timezone", default="UTC", help="of --cron (default: %(default)s)")
    serve.add_argument("--name", default="nightly", help="name of the deployment (default: %(default)s)")
    add_home(serve)
    serve.set_defaults(run=_serve)
    watch = commands.add_parser("watch", help="evaluate each checkpoint of a training run as it is saved")
    watch.add_argument("parameters", type=Path, help="as for serve, with one candidate: a directory or glob where training saves")
    watch.add_argument("--every", type=float, default=60.0, metavar="S", help="seconds between looks (default: %(default)s)")
    watch.add_argument("--once", action="store_true", help="evaluate what is there and not evaluated yet, then end")
    add_home(watch)
    watch.set_defaults(run=_watch)
    ui = commands.add_parser("ui", help="start Prefect's UI on the same data, in the foreground")
    ui.add_argument("--port", type=int, default=4200, help="default: %(default)s")
    add_home(ui)
    ui.set_defaults(run=_ui)
    return parser


def _add_describe(commands: Any) -> None:
    describe = commands.add_parser(
        "describe",
        help="what a checkpoint is: every field with its value and where it comes from",
        description="Say what a checkpoint is: every field with its value, where it stands, and whether it was read, inferred or "
        "given. Reads the index and the config only; writes nothing where the checkpoint lies.",
    )
    describe.add_argument("checkpoint", metavar="CHECKPOINT", help="as --candidate of `run`: a path, or HOST:PATH with --hosts")
    describe.add_argument("--hosts", type=Path, metavar="FILE", help="inventory")
    describe.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    describe.add_argument(
        "--write-config", type=Path, metavar="PATH", help="write a config.json in z-lab form that is read back to the same"
    )
    add_bare(describe)
    add_home(describe)
    describe.set_defaults(run=_describe)


def _add_rerun(commands: Any) -> None:
    rerun = commands.add_parser("rerun", help="run an earlier evaluation again; what is finished is not done again")
    rerun.add_argument("run_name", metavar="RUN", help="name of a run below HOME/runs, or `latest`")
    rerun.add_argument("--plan", action="store_true", help="only say what would run")
    rerun.add_argument("--from", dest="redo_from", metavar="STAGE", help="make this stage and all after it anew")
    add_placement(rerun)
    add_home(rerun)
    rerun.set_defaults(run=_rerun)


def _add_prompts(commands: Any) -> None:
    prompts = commands.add_parser("prompts", help="look at prompts as the target sees them, or write a published set to a file")
    actions = prompts.add_subparsers(title="actions", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="rendered head and tail (ids and text), digest of the chat template, thinking mode")
    show.add_argument("prompts", type=Path, metavar="FILE", help="JSONL")
    show.add_argument(
        "--target", required=True, metavar="DIR", help="target model: a directory, or HOST:DIR; only its tokenizer is read"
    )
    show.add_argument("--hosts", type=Path, metavar="FILE", help="inventory, for HOST:DIR")
    show.add_argument("--id", action="append", default=[], metavar="ID", help="show this prompt; may be given several times")
    show.add_argument("--first", type=int, default=3, metavar="N", help="without --id: show the first N (default: %(default)s)")
    thinking = show.add_mutually_exclusive_group()
    thinking.add_argument("--thinking", action="store_true", default=None, help="chat template with thinking on")
    thinking.add_argument("--no-thinking", dest="thinking", action="store_false", help="chat template with thinking off")
    add_home(show)
    show.set_defaults(run=_prompts_show)
    load = actions.add_parser(
        "load",
        help="write GSM8K, MATH-500, HumanEval, MBPP or MT-Bench (first turns) to a JSONL file",
        description="Write a published set to a JSONL file for --prompts. Needs the package `datasets`: pip install "
        "'dflash-eval[datasets]'. Without access to the hub, copy the set's parquet or JSON files here and name their directory.",
    )
    load.add_argument("name", metavar="SET", help="gsm8k, math500, humaneval, mbpp or mt-bench")
    load.add_argument("file", type=Path, metavar="FILE", help="where to write; must not exist")
    load.add_argument("--source", type=Path, metavar="DIR", help="directory with the split's files, instead of the hub")
    load.add_argument("--revision", metavar="COMMIT", help="of the hub's repository (default: its newest)")
    load.add_argument("--limit", type=int, metavar="N", help="take N prompts, evenly spaced through the set")
    load.set_defaults(run=_prompts_load)


def _add_hosts(commands: Any) -> None:
    hosts = commands.add_parser("hosts", help="look at the machines of an inventory")
    actions = hosts.add_subparsers(title="actions", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="what each host has, and which reach each other; writes nothing")
    trust = actions.add_parser("trust", help="show the key that a host offers and add it to known_hosts once confirmed")
    trust.add_argument("name", metavar="NAME", help="host of the inventory")
    trust.add_argument("--yes", action="store_true", help="do not ask; only for a fingerprint that was compared already")
    for action in (check, trust):
        action.add_argument("--hosts", type=Path, required=True, metavar="FILE", help="inventory")
        add_home(action)
    check.set_defaults(run=_hosts_check)
    trust.set_defaults(run=_hosts_trust)


def _add_bundle(commands: Any) -> None:
    bundle = commands.add_parser("bundle", help="write a few prompts of a finished run as one file that replays anywhere")
    bundle.add_argument("run_name", metavar="RUN", help="name of a run below HOME/runs, or `latest`")
    bundle.add_argument(
        "--prompts", type=positive, default=3, metavar="N", help="how many, from the first (default: %(default)s)"
    )
    bundle.add_argument("--output", type=Path, metavar="FILE", help="default: RUN.bundle.zip here")
    bundle.add_argument(
        "--without-weights", dest="weights", action="store_false", help="leave weights and tables out and name their digests"
    )
    add_home(bundle)
    bundle.set_defaults(run=_bundle)
    replay = commands.add_parser("replay-bundle", help="replay such a file here and say whether the outcome is equal")
    replay.add_argument("file", type=Path, metavar="FILE")
    replay.add_argument(
        "--file", dest="files", type=Path, action="append", default=[], metavar="PATH", help="a file that the bundle leaves out"
    )
    replay.set_defaults(run=_replay_bundle)


def _run(options: argparse.Namespace) -> int:
    from flows.running import parameters_from_options, run_or_plan

    home = home_of(options)
    return run_or_plan(lambda: parameters_from_options(options, home), home, plan=options.plan)


def _rerun(options: argparse.Namespace) -> int:
    from flows.running import parameters_of_run, run_or_plan

    home = home_of(options)
    return run_or_plan(lambda: parameters_of_run(home, options), home, plan=options.plan)


def _describe(options: argparse.Namespace) -> int:
    from flows import describe

    return describe.run(options, home=home_of(options))


def _bundle(options: argparse.Namespace) -> int:
    from flows.bundling import bundle

    home = home_of(options)
    return bundle(options.run_name, home=home, prompts=options.prompts, destination=options.output, weights=options.weights)


def _replay_bundle(options: argparse.Namespace) -> int:
    from flows.bundling import replay

    return replay(options.file, files=options.files)


def _demo(options: argparse.Namespace) -> int:
    from flows.demo import run_demo

    return run_demo(options.directory.resolve())


def _prompts_show(options: argparse.Namespace) -> int:
    from flows.prompts import show

    chosen = {"hosts": options.hosts, "home": home_of(options), "thinking": options.thinking}
    return show(options.prompts, options.target, ids=options.id, first=max(options.first, 0), **chosen)


def _prompts_load(options: argparse.Namespace) -> int:
    from flows.prompts import load

    if options.limit is not None and options.limit < 1:
        raise InputError("--limit must be at least 1.", "Leave it out for the whole set.")
    return load(options.name, options.file, source=options.source, revision=options.revision, limit=options.limit)


def _hosts_check(options: argparse.Namespace) -> int:
    from flows.hosts import check

    return check(options.hosts, home=home_of(options))


def _hosts_trust(options: argparse.Namespace) -> int:
    from flows.hosts import trust

    return trust(options.hosts, options.name, home=home_of(options), yes=options.yes)


def _serve(options: argparse.Namespace) -> int:
    from flows.serving import serve

    return serve(options.parameters, home=home_of(options), cron=options.cron, timezone=options.timezone, name=options.name)


def _watch(options: argparse.Namespace) -> int:
    from flows.serving import watch

    return watch(options.parameters, home=home_of(options), every_s=options.every, once=options.once)


def _ui(options: argparse.Namespace) -> int:
    from flows.serving import ui

    return ui(home=home_of(options), port=options.port)


def _say_error(error: EvalError) -> None:
    bold, off = ("\x1b[1;31m", "\x1b[0m") if sys.stderr.isatty() and "NO_COLOR" not in os.environ else ("", "")
    print(f"{bold}{error.problem}{off}", file=sys.stderr)
    if error.fix:
        print(f"  fix: {error.fix}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
