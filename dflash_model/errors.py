"""The error tree: every error a user can meet says what broke and what to do about it.

EvalError                 problem + fix
├── InputError            a request, prompt file or config that the user must change      (exit 2)
│   ├── CheckpointError   a checkpoint file that cannot be read for what it claims to be
│   │   └── SourceChanged it became another one while it was read; the run looks for it again
│   └── ConfigError       a drafter or target config with a missing, wrong or conflicting key
├── StageError            a stage program failed for a reason of its own                  (exit 3)
│   ├── StageKilled       it ended by a signal (9: most likely out of memory)
│   ├── DeadlineExceeded  it ran past its deadline and was ended
│   └── StorageError      disk full, unwritable directory, damaged artifact
├── HostError             a host that cannot be reached or used                           (exit 3)
│   ├── HostFull          a host without room for what it should hold
│   └── HostBusy          a host that answers, but has no GPU free, or whose serving engine is down or busy
│       └── HostTaken     all it has are taken by others, who will be done some time
├── ArtifactLost          what was made is on no reachable host any more; it is made anew (exit 3)
├── Regressed             every stage ran, and a rule of the gate says the night is red   (exit 4)
├── NotEvaluable          the hidden states are not faithful; no tau is given             (exit 5)
└── Cancelled             the user ended the run                                          (exit 130)

An error crosses a process border as {kind, problem, fix}; `from_json` rebuilds the same class. Every class takes
exactly (problem, fix) and hands both to Exception, so that instances survive pickling.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar


class EvalError(Exception):
    """What broke (`problem`) and what to do about it (`fix`); both are whole sentences."""

    exit_code: ClassVar[int] = 3
    kind: ClassVar[str] = "error"

    def __init__(self, problem: str, fix: str = "") -> None:
        super().__init__(problem, fix)
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}\n  fix: {self.fix}" if self.fix else self.problem

    def to_json(self) -> dict[str, str]:
        """{kind, problem, fix}: what a stage program writes as error.json."""
        return {"kind": self.kind, "problem": self.problem, "fix": self.fix}


class InputError(EvalError):
    """The user's request, prompts or configuration must change; trying again changes nothing."""

    exit_code = 2
    kind = "input"


class CheckpointError(InputError):
    """A checkpoint file that is missing, truncated, growing, of an unknown form, or refused."""

    kind = "checkpoint"


class SourceChanged(CheckpointError):
    """A checkpoint was overwritten, replaced or removed while it was read; looking for it again may mend it."""

    kind = "source_changed"


class ConfigError(InputError):
    """A drafter's or target's configuration lacks a key, or holds a wrong or conflicting value."""

    kind = "config"


class StageError(EvalError):
    """A stage program failed; another host would fail in the same way."""

    kind = "stage"


class StageKilled(StageError):
    """A stage program was ended by a signal."""

    kind = "killed"


class DeadlineExceeded(StageError):
    """A stage program ran past its deadline; its process group was ended."""

    kind = "deadline"


class StorageError(StageError):
    """A disk that is full or not writable, or an artifact that is damaged."""

    kind = "storage"


class HostError(EvalError):
    """A host that cannot be reached or used; another host may do."""

    kind = "host"


class HostFull(HostError):
    """A host has no room for what it should hold; waiting does not help, another host may."""

    kind = "host_full"


class HostBusy(HostError):
    """A host answers, but its GPUs or its serving engine cannot be had now; what it holds can, waiting or another host may help."""

    kind = "host_busy"


class HostTaken(HostBusy):
    """Others use every GPU that this host could give; whoever waits gets one."""

    kind = "host_taken"


class ArtifactLost(EvalError):
    """An artifact that had been made is on no reachable host any more; making it anew mends it."""

    kind = "lost"


class NotEvaluable(EvalError):
    """The fidelity gate failed: a tau from these hidden states would say nothing about the drafter."""

    exit_code = 5
    kind = "not_evaluable"


class Regressed(EvalError):
    """The evaluation is complete and published, and a rule of its gate is broken."""

    exit_code = 4
    kind = "regressed"


class Cancelled(EvalError):
    """The run was ended on request."""

    exit_code = 130
    kind = "cancelled"


_TREE: tuple[type[EvalError], ...] = (
    EvalError, InputError, CheckpointError, SourceChanged, ConfigError, StageError, StageKilled, DeadlineExceeded, StorageError,
    HostError, HostFull, HostBusy, HostTaken, ArtifactLost, Regressed, NotEvaluable, Cancelled,
)  # fmt: skip
BY_KIND: dict[str, type[EvalError]] = {cls.kind: cls for cls in _TREE}


def from_json(data: dict[str, Any]) -> EvalError:
    """Rebuild an error from {kind, problem, fix}; an unknown kind becomes StageError."""
    cls = BY_KIND.get(str(data.get("kind")), StageError)
    return cls(str(data.get("problem", "")), str(data.get("fix", "")))


def from_os_error(exc: OSError, doing: str) -> EvalError:
    """Translate an OSError met while `doing` something (a sentence fragment such as "writing /a/b")."""
    reason = exc.strerror or str(exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageError(f"No room while {doing}: {reason}.", "Free disk space there and run again; finished work is kept.")
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"Not allowed while {doing}: {reason}.", "Check the owner and mode of that path.")
    if exc.errno in (errno.ENOENT, errno.ENOTDIR):
        return InputError(f"Not found while {doing}: {exc.filename or reason}.", "Check the path.")
    if exc.errno == errno.EISDIR:
        return InputError(f"A directory where a file was expected, while {doing}: {exc.filename or reason}.", "Check the path.")
    return StorageError(f"The system refused while {doing}: {reason}.", "Check the disk of that host.")
