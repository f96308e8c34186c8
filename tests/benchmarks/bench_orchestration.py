"""What it costs to have a stage run: start, watch, tidy up, on this machine and over SSH; and a night in which all is done.

    python tests/benchmarks/bench_orchestration.py [--json] [--rounds 9] [--nights 3]

runner_overhead_*_s  wall time of Host.run_stage for a small stage (identify-target on the demo's target) less the seconds
                     that the stage itself reports; median; local and SSH take turns. The rest is starting an interpreter,
                     and over SSH the supervisor, the listening and the tidying up.
first_use_ssh_s      the same for the first stage on a host: connecting and bringing the code included
cached_night_s       wall time of the flow `evaluate` on the demo's data when every stage is done already, on a Prefect
                     server that is up; median
The SSH rows need the lab (deployments/lab: root, iproute2, openssh-server). Minutes, most of them for the first night.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reporting import Row, arguments, report, row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "deployments" / "lab"))

from lab import Lab, why_impossible

from dflash_model.stages.protocol import Request
from tasks.remote.host import Host
from tasks.remote.inventory import read_inventory
from tasks.remote.opening import open_host

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "deployments" / "demo" / "target"
LOCAL_BAR_S, SSH_BAR_S, NIGHT_BAR_S = 1.5, 3.0, 15.0
DEADLINE_S = 300.0


class Probe:
    """Runs the small stage on one host, anew each time."""

    def __init__(self, host: Host, target: Path, log_path: Path) -> None:
        self._host, self._target, self._log_path = host, target, log_path
        self._count = 0
        self.overheads_s: list[float] = []

    def overhead_s(self) -> float:
        """Seconds of one run that are not the stage's own."""
        self._count += 1
        key = f"bench-{self._count}"
        events: list[dict[str, Any]] = []
        request = Request(
            stage="identify-target",
            key=key,
            work_dir=Path(self._host.work_dir),
            inputs={},
            parameters={"path": str(self._target)},
            local={},
        )
        started = time.perf_counter()
        self._host.run_stage(request, log_path=self._log_path, deadline_s=DEADLINE_S, on_event=events.append)
        wall_s = time.perf_counter() - started
        self._host.remove(self._host.work_dir / "artifacts" / key)
        (finished,) = [event for event in events if event["event"] == "finished"]
        return wall_s - float(finished["seconds"])

    def measure(self) -> None:
        """One more run for the median."""
        self.overheads_s.append(self.overhead_s())

    def row(self, what: str, *, most: float) -> Row:
        """The median; the scatter goes to stderr."""
        seconds = self.overheads_s
        print(f"{what}: {len(seconds)} runs, {min(seconds):.3f} to {max(seconds):.3f} s", file=sys.stderr)
        return row(what, statistics.median(seconds), "s", most=most)


def local_probe(directory: Path) -> Probe:
    """A host that is a directory of this machine."""
    hosts = directory / "local.yaml"
    hosts.write_text(f"hosts:\n  here: {{work_dir: {directory / 'work'}, threads: 1}}\n")
    entry = read_inventory(hosts, home=directory).entry("here")
    return Probe(open_host(entry).host, TARGET, directory / "log")


def runner_overheads(directory: Path, rounds: int) -> list[Row]:
    """Local and SSH in turns; without the lab local alone, and nulls."""
    local = local_probe(directory)
    local.overhead_s()
    reason = why_impossible()
    if reason is not None:
        for _ in range(rounds):
            local.measure()
        missing = [("runner_overhead_ssh_s", SSH_BAR_S), ("first_use_ssh_s", None)]
        return [
            local.row("runner_overhead_local_s", most=LOCAL_BAR_S),
            *(row(what, None, "s", most=most, reason=reason) for what, most in missing),
        ]
    lab = Lab(directory / "lab")
    try:
        lab.up()
        shutil.copytree(TARGET, lab.disk("gpu-a") / "work" / "target")
        host = open_host(read_inventory(lab.hosts_file, home=directory).entry("gpu-a")).host
        remote = Probe(host, lab.work / "target", directory / "log")
        first_s = remote.overhead_s()
        for number in range(rounds):
            for probe in (local, remote) if number % 2 == 0 else (remote, local):
                probe.measure()
        host.close()
    finally:
        lab.down()
    return [
        local.row("runner_overhead_local_s", most=LOCAL_BAR_S),
        remote.row("runner_overhead_ssh_s", most=SSH_BAR_S),
        row("first_use_ssh_s", first_s, "s"),
    ]


def cached_night(directory: Path, nights: int) -> Row:
    """The first night does the work and is not measured; each later one must find all of it done."""
    from rich.console import Console

    from flows.demo import demo_parameters, lay_out
    from flows.environment import hand_over, prepare, quiet_console
    from flows.server import prefect_server

    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        del os.environ[name]  # neither the user's server nor their results
    home = directory / "home"
    prepare(home)
    lay_out(directory, Console(stderr=True))
    with prefect_server(home / "server.log"):
        from flows.evaluate import evaluate

        quiet_console(home / "flow.log")
        parameters = demo_parameters(directory, home)
        started = time.perf_counter()
        evaluate(parameters)
        print(f"first night: {time.perf_counter() - started:.1f} s", file=sys.stderr)
        seconds = []
        for _ in range(nights):
            started = time.perf_counter()
            outcome = evaluate(parameters)
            seconds.append(time.perf_counter() - started)
            if {stage["state"] for stage in outcome["stages"]} != {"cached"}:
                raise AssertionError(outcome["stages"])
        hand_over()
    print(f"cached nights: {', '.join(f'{s:.2f}' for s in seconds)} s, {len(outcome['stages'])} stages", file=sys.stderr)
    return row("cached_night_s", statistics.median(seconds), "s", most=NIGHT_BAR_S)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="runs of the small stage on each host")
    parser.add_argument("--nights", type=int, default=3, help="nights in which everything is done already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        rows = [*runner_overheads(directory, options.rounds), cached_night(directory, options.nights)]
    report("orchestration", rows, packages=("prefect", "paramiko", "torch"), as_json=options.json)


if __name__ == "__main__":
    main()
