"""The options of `dflash-eval run`, and those that other commands share with it. Only argparse: `--help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any


def add_home(parser: argparse.ArgumentParser) -> None:
    """Where runs and stores lie."""
    parser.add_argument("--home", type=Path, help="where runs and stores lie (default: $DFLASH_EVAL_HOME or ~/.dflash-eval)")


def add_run(commands: Any, *, then: Callable[[argparse.Namespace], int]) -> None:
    """The command `run` with all its options; `then` does it."""
    run = commands.add_parser(
        "run",
        help="evaluate candidates against a reference drafter",
        description="Evaluate candidates against a reference drafter. PATH is a .pt training file or a directory with config.json "
        "and safetensors; HOST:PATH lies on a host of --hosts. A glob takes the newest complete match.",
    )
    run.add_argument(
        "--candidate", action="append", required=True, metavar="PATH", help="drafter to judge; may be given several times"
    )
    run.add_argument("--reference", metavar="PATH", help="drafter to compare with")
    run.add_argument("--target", required=True, metavar="DIR", help="target model: a directory, HOST:DIR, or hf:ID@REVISION")
    run.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE", help="JSONL: id, category, and messages | prompt | prompt_ids"
    )
    run.add_argument("--hosts", type=Path, metavar="FILE", help="inventory; none: this machine plays every part")
    run.add_argument(
        "--plan", action="store_true", help="say what would run, where, what is there and how many bytes would move; do nothing"
    )
    made = run.add_argument_group("references")
    made.add_argument(
        "--references-from",
        choices=("transformers", "sglang", "openai", "openai-text"),
        default="transformers",
        help="who generates: transformers in the stage, or a running engine: sglang (/generate), openai (/v1/completions with "
        "token ids: vLLM, SGLang), openai-text (text only, checked sample by sample) (default: %(default)s)",
    )
    made.add_argument("--server", metavar="URL", help="the engine's address as the target's host sees it")
    made.add_argument("--server-model", metavar="NAME", help="the model's name there, if it serves several")
    made.add_argument("--server-concurrency", type=int, default=4, metavar="N", help="requests at a time (default: %(default)s)")
    made.add_argument(
        "--server-timeout", type=float, default=600.0, metavar="S", help="longest wait for one completion (default: %(default)s)"
    )
    made.add_argument(
        "--server-key-file",
        metavar="FILE",
        help="file with its key on that host, mode 0600; without it $DFLASH_EVAL_ENGINE_KEY there, if set",
    )
    made.add_argument("--max-new-tokens", type=int, default=256, help="limit of a completion (default: %(default)s)")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the target (default: %(default)s)")
    thinking = made.add_mutually_exclusive_group()
    thinking.add_argument("--thinking", action="store_true", default=None, help="chat template with thinking on")
    thinking.add_argument("--no-thinking", dest="thinking", action="store_false", help="chat template with thinking off")
    _add_hidden_states(run)
    bare = add_bare(run)
    bare.add_argument("--config-from", choices=("reference",), help="take it from the reference after comparing every shape")
    run.add_argument(
        "--cast",
        choices=("keep", "bf16"),
        default="keep",
        help="bf16: round float32 weights when they are taken out of a checkpoint, half as much moves (default: %(default)s)",
    )
    run.add_argument(
        "--tail",
        choices=("truncated", "zlab", "pypi", "deepspec"),
        default="truncated",
        help="how a request's last step is drafted and counted (default: %(default)s, as serving engines do)",
    )
    run.add_argument(
        "--anchors",
        type=_anchors,
        default="visited",
        metavar="visited|all|N",
        help="anchors to replay: those that walks visit, all, or also every N-th; the last two give the uniform-anchor tau",
    )
    run.add_argument(
        "--equal-within",
        type=float,
        default=0.02,
        metavar="D",
        help="relative difference that counts as equal (default: %(default)s)",
    )
    _add_gate(run)
    add_placement(run)
    run.add_argument("--shards", type=int, default=1, help="parts into which each replay is split (default: %(default)s)")
    run.add_argument(
        "--deadline", type=float, default=21600.0, metavar="S", help="longest time of one stage in seconds (default: %(default)s)"
    )
    run.add_argument(
        "--gpu-wait",
        type=float,
        default=3600.0,
        metavar="S",
        help="how long a stage waits where others use every GPU it could have, in seconds (default: %(default)s)",
    )
    add_home(run)
    run.set_defaults(run=then)


def _add_hidden_states(run: argparse.ArgumentParser) -> None:
    states = run.add_argument_group("hidden states")
    states.add_argument(
        "--extraction",
        choices=("auto", "full", "streaming"),
        default="auto",
        help="full loads the target whole; streaming reads it layer by layer in bounded memory, with the same result; "
        "auto looks at the free memory and says why (default: %(default)s)",
    )
    states.add_argument("--max-gpu-memory", type=float, metavar="GIB", help="take no more of a GPU than this")
    states.add_argument(
        "--extraction-batch", type=int, default=1, metavar="N", help="sequences in one padded forward (default: %(default)s)"
    )
    states.add_argument(
        "--states-from",
        metavar="ENGINE:DIR",
        help="take them from vLLM's extract_hidden_states files (vllm:DIR) or SGLang's saved /generate answers (sglang:DIR) on "
        "the host that runs the stage; accepted once one prompt, computed there, agrees layer by layer",
    )
    states.add_argument(
        "--engine-layer-ids", type=_int_list, metavar="I,J,..", help="as the engine was given them; with the last layer's"
    )
    states.add_argument(
        "--fidelity",
        action="append",
        type=_named_number,
        default=[],
        metavar="LINE=VALUE",
        help="move a line of the fidelity gate, such as fail_agree=0.85; may be given several times",
    )


def _named_number(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like fail_agree=0.85") from None


def add_bare(parser: argparse.ArgumentParser) -> Any:
    """What a bare training file does not say of itself; returns the group, for one more option."""
    bare = parser.add_argument_group(
        "bare .pt", "what a training file without a config does not tell by its tensors and saved args"
    )
    bare.add_argument("--config", metavar="FILE", help="config.json in z-lab form")
    bare.add_argument("--mask-token-id", type=int, metavar="ID")
    bare.add_argument("--target-layer-ids", type=_int_list, metavar="I,J,..", help="i is the output of 0-based target layer i")
    bare.add_argument("--block-size", type=int, metavar="N")
    bare.add_argument("--rope-theta", type=float, metavar="X")
    bare.add_argument("--rms-norm-eps", type=float, metavar="X")
    bare.add_argument("--state-key", metavar="KEY", help="where in the file the drafter's state dict is, if under no usual key")
    return bare


def _add_gate(run: argparse.ArgumentParser) -> None:
    gate = run.add_argument_group(
        "gate", "rules that end the run as Regressed, with exit code 4; everything is published all the same"
    )
    gate.add_argument(
        "--fail-if-worse",
        type=float,
        metavar="D",
        help="a candidate is worse than the reference by more than this share of its tau",
    )
    gate.add_argument(
        "--fail-if-worse-than-best", type=float, metavar="D", help="likewise against the best earlier checkpoint of its directory"
    )
    gate.add_argument("--min-tau", type=float, metavar="TAU", help="a candidate's pooled tau lies below")
    gate.add_argument("--require-fidelity-pass", action="store_true", help="the fidelity gate says anything but PASS")
    news = run.add_argument_group(
        "news", "a Slack-compatible webhook; its address comes from $DFLASH_EVAL_WEBHOOK or a Secret block"
    )
    news.add_argument("--notify", choices=("always", "trouble", "never"), default="always", help="when (default: %(default)s)")
    news.add_argument("--webhook-block", metavar="NAME", help="Prefect Secret block that holds the webhook's address")
    news.add_argument("--report-link", metavar="URL", help="address under which HOME/runs is served, for the link in the message")


def add_placement(parser: argparse.ArgumentParser) -> None:
    """Which hosts run which stage, and what happens when one is down."""
    parser.add_argument(
        "--place",
        action="append",
        type=_placement,
        default=[],
        metavar="STAGE=HOST[,HOST..]",
        help="hosts for a stage, in order; may be given several times",
    )
    parser.add_argument(
        "--no-failover", dest="failover", action="store_false", help="do not go on with the next host when one is down"
    )


def _placement(text: str) -> tuple[str, list[str]]:
    stage, equals, hosts = text.partition("=")
    if not equals or not stage or not all(hosts.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not like hidden-states=gpu-b")
    return stage.replace("_", "-"), hosts.split(",")


def _anchors(text: str) -> str | int:
    if text in ("visited", "all"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not visited, all or a number above 0")


def _int_list(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers like 1,9,17") from None


def positive(text: str) -> int:
    """A whole number above 0."""
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
