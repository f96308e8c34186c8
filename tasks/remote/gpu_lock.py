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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

from dflash_model.errors import EvalError, HostBusy, HostError
from dflash_model.stages.process_groups import ProcessIdentity
from tasks.remote import failures
from tasks.remote.code import last_line
from tasks.remote.lease import Lease
from tasks.remote.patience import Patience
from tasks.remote.shell import Shell

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 60.0
RELEASE_GRACE_S = 15.0
RENEWALS_A_LIFE = 8
ENDING_S = 60.0
MIB_A_GIB = 1024


def lock_lifetime_s(lease_s: float) -> float:
    """How long a lock outlives its last renewal, where a stage outlives its runner by `lease_s`: longer than the stage does,
    even if the lock was renewed some time before the lease was, or in vain; and ending a stage takes time."""
    return 1.5 * lease_s + ENDING_S


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

    @property
    def local(self) -> dict[str, Any]:
        """What a stage's request says of it; runners let the program see no other GPU."""
        return {"gpu": self.number} | ({"device": "cuda"} if self.cuda else {})


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
        self._directory = work_dir / "locks"
        self._gpus, self._min_free_gib, self._lifetime_s = tuple(gpus), min_free_gib, lifetime_s

    @contextmanager
    def holding(self, holder: str) -> Iterator[HeldGpu]:
        """Hold a GPU while the body runs, which runs a stage there. Raises HostBusy where none is free, HostError.

        Where the body's error says that the stage may run on, the lock is not given back: it ends by itself, after the stage.
        """
        token = uuid.uuid4().hex
        gpu = self._take(holder, token)
        done, over = False, True
        try:
            with Lease(_Renewal(functools.partial(self._renew, gpu.number, token)), every_s=self._lifetime_s / RENEWALS_A_LIFE):
                yield gpu
            done = True
        except BaseException as exc:
            over = not failures.may_still_run(exc)
            raise
        finally:
            if over:
                self._release(gpu.number, token, patient=done)
            else:
                log.warning("[%s] gpu %d stays ours for up to %g s", self._shell.name, gpu.number, self._lifetime_s)

    def _take(self, holder: str, token: str) -> HeldGpu:
        wanted = None if self._min_free_gib is None else self._min_free_gib * MIB_A_GIB
        answer = self._call(
            "take",
            token,
            holder=holder,
            process=ProcessIdentity.of_this_process().to_json(),
            ttl_s=self._lifetime_s,
            gpus=self._gpus,
            min_free_mib=wanted,
        )
        if answer["gpu"] is None:
            reasons = "; ".join(self._why(refused) for refused in answer["refused"])
            raise HostBusy(
                f"[{self._shell.name}] no GPU is free: {reasons}.",
                "Wait for it, or name another host with --place. A lock whose holder is gone ends by itself.",
            )
        if answer["instead_of"] is not None:
            log.warning("[%s] gpu %d: the lock of %s had expired", self._shell.name, answer["gpu"], answer["instead_of"])
        log.info("[%s] gpu %d is ours", self._shell.name, answer["gpu"])
        return HeldGpu(number=answer["gpu"], cuda=answer["cuda"])

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

    def _call(self, do: str, token: str, **order: Any) -> dict[str, Any]:
        text = json.dumps({"do": do, "directory": str(self._directory), "token": token, **order})
        script = f"exec {shlex.join([self._python, '-I', '-', text])}"
        done = self._shell.run(script, timeout_s=CALL_TIMEOUT_S, stdin=_program())
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

    def _why(self, refused: Mapping[str, Any]) -> str:
        match refused:
            case {"problem": problem}:
                return str(problem)
            case {"gpu": gpu, "holder": holder, "expired": True}:
                return f"gpu {gpu} is held by {holder}, which still runs though it does not renew its lock"
            case {"gpu": gpu, "holder": holder, "expires_at": expires_at}:
                return f"gpu {gpu} is held by {holder} until {_for_people(expires_at)}"
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
    """A lock file for people: who holds `name` until when. What is no lock of ours is given as it is."""
    try:
        data = json.loads(content)
        return f"{name} held by {data['holder']} until {_for_people(data['expires_at'])}"
    except (ValueError, KeyError, TypeError):
        return f"{name} {content}".strip()


def _for_people(expires_at: str) -> str:
    return f"{datetime.fromisoformat(expires_at).astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


@functools.lru_cache(maxsize=1)
def _program() -> bytes:
    return files("tasks.remote").joinpath("lock_program.py").read_bytes()
