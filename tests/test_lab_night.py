"""The whole night across real hosts: the same numbers as on one machine, a host that dies, re-running elsewhere."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab import Lab

from dflash_model.errors import DeadlineExceeded, HostError
from dflash_model.stages.registry import STAGES
from flows.parameters import DrafterSource, EvaluateParameters, References, TargetSource
from tasks.events import Event
from tests.lab_night import DEMO, PROMPTS, FinishedNight, numbers, run

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("prefect_api")]
LEASE_S = 8
ROOT = Path(__file__).resolve().parent.parent
NightBefore = Callable[[str | None], EvaluateParameters]


def rows(outcome: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["name"]: (row["state"], row["host"]) for row in outcome["stages"]}


@pytest.fixture(scope="module")
def single(prefect_api: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The numbers of the same evaluation on this machine alone."""
    directory = tmp_path_factory.mktemp("alone")
    shutil.copytree(DEMO / "drafters" / "step-00220", directory / "reference")
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    alone = EvaluateParameters(
        home=str(directory / "home"),
        candidates=[DrafterSource(path=str(checkpoint))],
        reference=DrafterSource(path=str(directory / "reference")),
        target=TargetSource(path=str(DEMO / "target")),
        prompts=str(directory / "prompts.jsonl"),
        references=References(max_new_tokens=48),
        deadline_s=120,
    )
    return numbers(run(alone))


def test_the_night_across_hosts_gives_the_numbers_of_one_machine(
    finished_night: FinishedNight, night_before: NightBefore, single: Any
) -> None:
    outcome = finished_night.outcome
    assert rows(outcome)["relay step-00110"] == ("ran", "eval")
    assert rows(outcome)["hidden states"] == ("ran", "gpu-a")
    assert rows(outcome)["replay step-00110"] == ("ran", "eval")
    assert {state for state, _ in rows(outcome).values()} == {"ran"}
    assert numbers(outcome) == single
    again = run(night_before(None))
    assert {state for state, _ in rows(again).values()} == {"cached"}
    assert numbers(again) == single


def restart_after_power_cut(lab: Lab, name: str) -> None:
    """What a power cut left in a run's directory is swept by a later run, a day on; not waited for here."""
    lab.restart(name)
    shutil.rmtree(lab.disk(name) / "work" / "runs", ignore_errors=True)


class When:
    """Does something once a stage has said something (or has started)."""

    def __init__(self, stage: str, do: Callable[[], None], *, what: str = "note", delay_s: float = 0.0) -> None:
        self.stage, self.do, self.what, self.delay_s, self.done = stage, do, what, delay_s, False

    def __call__(self, event: Event) -> None:
        if event.stage == self.stage and event.what == self.what and not self.done:
            self.done = True
            threading.Timer(self.delay_s, self.do).start()


def test_a_gpu_host_that_dies_in_mid_extraction_is_replaced(lab: Lab, night_before: NightBefore, single: Any) -> None:
    try:
        outcome = run(night_before("hidden-states"), When("hidden states", lambda: lab.kill("gpu-a")))
        assert rows(outcome)["hidden states"] == ("ran", "gpu-b")
        # What gpu-a alone held died with it and was made again; the references, which the relay keeps, were not.
        assert rows(outcome)["references"][0] == "cached"
        made = [(row["state"], row["host"]) for row in outcome["stages"] if row["name"] == "target tables"]
        assert [state for state, _ in made] == ["cached", "ran"], "the account has both attempts"
        assert made[1] == ("ran", "gpu-b")
        assert numbers(outcome) == single
    finally:
        restart_after_power_cut(lab, "gpu-a")


def typed_rerun(night: EvaluateParameters, *options: str) -> dict[str, Any]:
    """run.json of `dflash-eval rerun` of the night's only run, as a person types it: another process, with a server of its own."""
    runs = Path(str(night.home)) / "runs"
    (failed,) = [path.parent.name for path in runs.glob("*/request.json")]
    command = [sys.executable, "-m", "flows.cli", "rerun", failed, "--home", str(night.home), *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    outcome: dict[str, Any] = json.loads((runs / "latest" / "run.json").read_text())
    return outcome


def test_without_failover_the_run_fails_and_a_rerun_elsewhere_does_only_what_is_missing(
    lab: Lab, night: EvaluateParameters
) -> None:
    try:
        with pytest.raises(HostError, match="gpu-a"):
            run(night.model_copy(update={"failover": False}), When("hidden states", lambda: lab.kill("gpu-a")))
        outcome = typed_rerun(night, "--place", "hidden_states=gpu-b", "--place", "target-tables=gpu-b")
    finally:
        restart_after_power_cut(lab, "gpu-a")
    states = rows(outcome)
    assert states["hidden states"] == ("ran", "gpu-b")
    for name in ("extract reference", "extract step-00110", "references", "relay step-00110"):
        assert states[name][0] == "cached"


def test_states_that_died_with_their_host_are_made_again_elsewhere(lab: Lab, night_before: NightBefore) -> None:
    """gpu-a finishes and dies before anybody fetched its states: they count as missing."""
    try:
        outcome = run(night_before("hidden-states"), When("hidden states", lambda: lab.kill("gpu-a"), what="ran"))
        made = [(row["state"], row["host"]) for row in outcome["stages"] if row["name"] == "hidden states"]
        assert made == [("ran", "gpu-a"), ("ran", "gpu-b")], "the account has both attempts"
    finally:
        restart_after_power_cut(lab, "gpu-a")


def test_a_short_cut_of_the_link_loses_nothing(lab: Lab, night_before: NightBefore) -> None:
    night = night_before("references")
    started: list[int] = []

    def cut() -> None:
        started.extend(pid for pid, line in lab.processes("gpu-a").items() if "dflash_model.stages references" in line)
        lab.cut_link("gpu-a")
        time.sleep(5)
        lab.mend_link("gpu-a")

    heard: list[str] = []
    outcome = run(night, When("references", cut), lambda event: heard.append(event.message))
    assert rows(outcome)["references"] == ("ran", "gpu-a")
    assert len(started) == 1
    assert not any("passed over" in message for message in heard)
    # The one process that was cut off is the one that finished: nobody loaded the target for references a second time.
    assert sum("references," in message for message in heard) == 1


def test_kill_9_of_the_relay_ends_the_remote_program_by_its_lease_and_the_next_run_goes_on(
    lab: Lab, night: EvaluateParameters, tmp_path: Path
) -> None:
    command = [
        str(Path(sys.executable).parent / "dflash-eval"),
        "run",
        "--home",
        str(night.home),
        "--hosts",
        str(night.inventory),
    ]
    command += ["--candidate", f"train:{night.candidates[0].path}", "--target", f"gpu-a:{night.target.path}"]
    assert night.reference is not None
    command += ["--reference", f"eval:{night.reference.path}", "--prompts", night.prompts, "--max-new-tokens", "48"]
    with (tmp_path / "out").open("w") as out:
        relay = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    until = time.monotonic() + 120
    while not any("references" in line for line in lab.processes("gpu-a").values()):
        assert relay.poll() is None, (tmp_path / "out").read_text()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(relay.pid, signal.SIGKILL)
    relay.wait()
    until = time.monotonic() + LEASE_S + 15
    while lab.processes("gpu-a") and time.monotonic() < until:
        time.sleep(0.2)
    assert lab.processes("gpu-a") == {}
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((Path(str(night.home)) / "runs" / "latest" / "result.json").read_text())
    assert len(result["drafters"]) == 2


def test_a_deadline_in_each_stage_ends_its_program(
    lab: Lab, night_before: NightBefore, living: Callable[[Path], list[str]]
) -> None:
    """Last stage first, so that each finds its inputs done. References run beside the tables and may be ended first."""
    night = night_before(None)
    for stage in reversed(list(STAGES)):
        with pytest.raises(DeadlineExceeded, match=f"stage ({stage}|references) ran past its deadline"):
            run(night.model_copy(update={"redo_from": stage, "deadline_s": 0.05}))
        left = {name: lab.processes(name) for name in lab.hosts if any("dflash_model" in p for p in lab.processes(name).values())}
        assert left == {}, stage
        assert living(Path(str(night.home))) == [], stage
    assert rows(run(night))["compare"][0] == "ran"


def test_a_link_that_stays_down_is_noticed_in_time_and_leaves_nothing_when_it_returns(
    lab: Lab, night_before: NightBefore
) -> None:
    cut_at: list[float] = []

    def cut() -> None:
        lab.cut_link("gpu-a")
        cut_at.append(time.monotonic())

    noticed: list[float] = []
    given = night_before("hidden-states").model_copy(update={"placement": {"hidden-states": ["gpu-a"]}, "failover": False})
    try:
        with pytest.raises(HostError, match="gpu-a"):
            run(
                given,
                When("hidden states", cut),
                lambda e: noticed.append(time.monotonic()) if "passed over" in e.message else None,
            )
        # silence_s 3 until the link counts as cut, grace_s 6 until its host counts as down, and a connection's own time-outs.
        assert noticed[0] - cut_at[0] < 3 + 6 + 8
        until = time.monotonic() + LEASE_S + 10
        while any("dflash_model" in line for line in lab.processes("gpu-a").values()) and time.monotonic() < until:
            time.sleep(0.2)
        assert not any("dflash_model" in line for line in lab.processes("gpu-a").values())
    finally:
        lab.mend_link("gpu-a")
    shutil.rmtree(lab.disk("gpu-a") / "work" / "runs", ignore_errors=True)
