"""One holder a GPU: locks that lie on the host, below its work directory, and end by themselves when their holder is gone.

They bind whoever uses the same work directory, from whichever relay. lock_program.py does the work there; all times are by
the host's clock. The memory is looked at because not everybody who uses a GPU takes a lock.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shlex
import socket
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from dflash_model.errors import EvalError, HostBusy, HostError, HostTaken
from dflash_model.stages.process_groups import ProcessIdentity
from tasks.remote import failures
from tasks.remote.code import last_line
from tasks.remote.command import program
from tasks.remote.lease import Lease
from tasks.remote.patience import Patience
from tasks.remote.shell import Shell

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
RELEASE_GRACE_S = 15.0
RENEWALS_A_LIFE = 4
LIFETIME_S = 60.0
LEAVE_TIMEOUT_S = 10.0
MIB_A_GIB = 1024


def lock_lifetime_s(lease_s: float) -> float:
    """How long a lock outlives its last renewal where no stage runs: a stage that outlives its runner keeps the GPU by itself,
    until its lease of `lease_s` ends it."""
    return min(LIFETIME_S, lease_s)


def this_holder(run_id: str) -> str:
    """What this process is called in a lock: for people, who want to know whom to ask."""
    return f"{socket.gethostname()} pid {os.getpid()}" + (f" run {run_id}" if run_id else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldGpu:
    """One GPU that is ours for now."""

    number: int
    """As nvidia-smi counts."""

    cuda: bool
    """nvidia-smi answered, so there is something to compute on."""

    lock: tuple[str, str] = field(default=("", ""), compare=False)
    """Lock file and token: a stage does not start once another has the lock."""

    @property
    def local(self) -> dict[str, Any]:
        """What a stage's request says of it; runners let the program see no other GPU."""
        lock = {"gpu_lock": list(self.lock)} if self.lock[0] else {}
        return {"gpu": self.number} | ({"device": "cuda"} if self.cuda else {}) | lock


class GpuLocks:
    """The GPUs of one host."""

    def __init__(
        self,
        shell: Shell,
        *,
        work_dir: PurePosixPath,
        python: str,
        gpus: Sequence[int],
        min_free_gib: float | None,
        lifetime_s: float,
    ) -> None:
        """`gpus` in order of preference. A lock that is not renewed for `lifetime_s` is free to be taken."""
        self._shell, self._python = shell, python
        self._directory, self._runs = work_dir / "locks", work_dir / "runs"
        self._gpus, self._min_free_gib, self._lifetime_s = tuple(gpus), min_free_gib, lifetime_s

    @contextmanager
    def holding(self, holder: str, *, ticket: str | None = None) -> Iterator[HeldGpu]:
        """Hold a GPU while the body runs, which runs a stage there. Raises HostBusy (HostTaken: one may wait), HostError.

        `ticket`: the caller waits in the queue under this name, and asks again or calls `leave`. Where the body's error says
        that the stage may run on, the lock is not given back: it ends by itself, after the stage.
        """
        token = uuid.uuid4().hex
        gpu = self._take(holder, token, ticket)
        with ExitStack() as stack:
            stack.push(functools.partial(self._give_back, gpu.number, token))
            every_s = self._lifetime_s / RENEWALS_A_LIFE
            stack.enter_context(Lease(_Renewal(functools.partial(self._renew, gpu.number, token)), every_s=every_s))
            yield gpu

    def leave(self, ticket: str) -> None:
        """Wait no more; where the host does not hear it, it forgets us after a while."""
        try:
            self._call("leave", "", timeout_s=LEAVE_TIMEOUT_S, ticket=ticket)
        except EvalError as exc:
            log.debug("the queue was not left: %s", exc.problem)

    def _give_back(self, gpu: int, token: str, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and failures.may_still_run(error):
            log.warning("[%s] gpu %d stays taken until its stage has ended", self._shell.name, gpu)
        else:
            self._release(gpu, token, patient=error is None)

    def _take(self, holder: str, token: str, ticket: str | None) -> HeldGpu:
        wanted = None if self._min_free_gib is None else self._min_free_gib * MIB_A_GIB
        answer = self._call(
            "take",
            token,
            holder=holder,
            process=ProcessIdentity.of_this_process().to_json(),
            ttl_s=self._lifetime_s,
            gpus=self._gpus,
            min_free_mib=wanted,
            runs=str(self._runs),
            ticket=ticket,
        )
        if answer["gpu"] is None:
            reasons = "; ".join(self._why(refused) for refused in answer["refused"])
            will_pass = any(self._will_pass(refused, wanted or 0.0) for refused in answer["refused"])
            raise (HostTaken if will_pass else HostBusy)(
                f"[{self._shell.name}] no GPU is free: {reasons}.",
                "Wait for it, or name another host with --place. A lock whose holder is gone ends by itself.",
            )
        if answer["instead_of"] is not None:
            log.warning("[%s] gpu %d: the lock of %s had expired", self._shell.name, answer["gpu"], answer["instead_of"])
        log.info("[%s] gpu %d is ours", self._shell.name, answer["gpu"])
        lock = str(self._directory / f"gpu-{answer['gpu']}"), token
        return HeldGpu(number=answer["gpu"], cuda=answer["cuda"], lock=lock)

    def _renew(self, gpu: int, token: str) -> bool:
        held: bool = self._call("renew", token, gpu=gpu, ttl_s=self._lifetime_s)["held"]
        if not held:
            log.warning("[%s] the lock of gpu %d was taken from us or removed", self._shell.name, gpu)
        return held

    def _release(self, gpu: int, token: str, *, patient: bool) -> None:
        """After a failure the host may be down, and one try must do. After a success the next stage will want the GPU."""
        release = functools.partial(self._call, "release", token, gpu=gpu)
        patience = Patience(
            f"[{self._shell.name}] releasing gpu {gpu}", grace_s=RELEASE_GRACE_S, first_pause_s=1.0, check=lambda: None
        )
        try:
            if patient:
                patience.call(release)
            else:
                release()
        except EvalError as exc:
            log.warning("the lock of gpu %d ends by itself within %g s: %s", gpu, self._lifetime_s, exc.problem)

    def _call(self, do: str, token: str, *, timeout_s: float = CALL_TIMEOUT_S, **order: Any) -> dict[str, Any]:
        text = json.dumps({"do": do, "directory": str(self._directory), "token": token, **order})
        script = f"exec {program(self._python)} {shlex.join(['-I', '-', text])}"
        done = self._shell.run(script, timeout_s=timeout_s, stdin=_program())
        try:
            if done.exit_code != 0:
                raise ValueError(done.exit_code)
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError as exc:
            raise HostError(
                f"[{self._shell.name}] {self._python} cannot tend the locks in {self._directory}: {last_line(done.stderr)}.",
                "Check `python` and the work directory of that host.",
            ) from exc
        return answer

    def _will_pass(self, refused: Mapping[str, Any], wanted_mib: float) -> bool:
        """Somebody uses it, with a lock or without. A GPU that is not there or too small, or an nvidia-smi that fails, stays so."""
        return any(key in refused for key in ("holder", "next", "run")) or refused.get("total_mib", -1.0) >= wanted_mib

    def _why(self, refused: Mapping[str, Any]) -> str:
        match refused:
            case {"problem": problem}:
                return str(problem)
            case {"gpu": gpu, "holder": holder, "taken_at": since, "expired": True, "run": run}:
                alive = f", whose stage still runs in {run}" if run else ", which still runs though it does not renew its lock"
                return f"gpu {gpu} is held by {holder} since {_for_people(since)}{alive}"
            case {"gpu": gpu, "holder": holder, "taken_at": since, "expires_at": expires_at}:
                return f"gpu {gpu} is held by {holder} since {_for_people(since)} until {_for_people(expires_at)} or longer"
            case {"gpu": gpu, "next": holder, "since": since}:
                return f"gpu {gpu} is next for {holder}, which waits for it since {_for_people(since)}"
            case {"gpu": gpu, "run": run}:
                return f"gpu {gpu} is used by the stage that runs in {run}"
            case {"gpu": gpu, "there_are": numbers}:
                return f"gpu {gpu} is not there, only {', '.join(map(str, numbers))}"
            case {"gpu": gpu, "free_mib": free_mib, "total_mib": total_mib}:
                have = f"{free_mib / MIB_A_GIB:.1f} of {total_mib / MIB_A_GIB:.3g} GiB free"
                return f"gpu {gpu} has {have}, wanted are {self._min_free_gib:g}"
            case _:
                raise AssertionError(refused)


class _Renewal:
    """Renews until the lock is lost; then there is nothing left to renew."""

    def __init__(self, renew: functools.partial[bool]) -> None:
        self._renew, self._held = renew, True

    def __call__(self, _count: int) -> None:
        self._held = self._held and self._renew()


def lock_sentence(name: str, content: str) -> str:
    """A lock file for people: who holds `name` since when. What is no lock of ours is given as it is."""
    try:
        data = json.loads(content)
        return f"{name} held by {data['holder']} since {_for_people(data['taken_at'])} until {_for_people(data['expires_at'])} or longer"
    except (ValueError, KeyError, TypeError):
        return f"{name} {content}".strip()


def _for_people(moment: str) -> str:
    return f"{datetime.fromisoformat(moment).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


@functools.lru_cache(maxsize=1)
def _program() -> bytes:
    return files("tasks.remote").joinpath("lock_program.py").read_bytes()
