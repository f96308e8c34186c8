"""Drafters where training left them: find the newest complete one, know it by content, bring its files to another host.

The training host is only ever read. A `.pt` is known by its pickle and the CRC32 of every storage, so its identity
costs a few kilobytes; a directory by the sha256 of its files.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from dflash_model.checkpoint.complete import describe_completeness
from dflash_model.checkpoint.step import step_of
from dflash_model.checkpoint.torch_file import read_torch_file
from dflash_model.digests import json_digest
from dflash_model.errors import CheckpointError, InputError
from tasks.remote.host import FileFacts, Host, literal_pattern
from tasks.remote.run_directories import checkpoint_name, checkpoints_in
from tasks.remote.transfer import OnBytes, copy_file

log = logging.getLogger(__name__)

TORCH, DIRECTORY = "torch", "directory"
SETTLE_S = 2.0
FRESH_S = 60.0
DIRECTORY_FILES = ("config.json", "tokenizer.json", "*.safetensors", "*.safetensors.index.json", "mask_embedding*")
MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteDrafter:
    """One drafter on the host where it was found. JSON-able."""

    name: str
    """How tables call it."""

    host: str
    """Where it lies."""

    path: str
    """Absolute path there: a `.pt` file or a directory."""

    form: str
    """TORCH or DIRECTORY."""

    files: tuple[tuple[str, int], ...]
    """(name below `path`, size in bytes); for TORCH the one file's own name."""

    digest: str
    """Identity of the content, whatever it is called and wherever it lies."""

    step: int | None
    """Training step that the file tells, None where it does not."""

    tokenizer_sha256: str | None
    """Of the tokenizer.json that comes with a directory."""

    @property
    def size_bytes(self) -> int:
        """All files together."""
        return sum(size for _, size in self.files)

    def to_json(self) -> dict[str, Any]:
        """A JSON value; `RemoteDrafter.from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RemoteDrafter:
        """Read what `to_json` gave, also after a round trip through JSON."""
        return cls(**data | {"files": tuple((name, size) for name, size in data["files"])})


def discover(host: Host, pattern: str, *, name: str | None = None, settle_s: float = SETTLE_S) -> RemoteDrafter:
    """The newest complete drafter that matches `pattern` on `host`.

    A run or step directory of SpecForge stands for its training states. What is still being written (no end record, or size
    or time still moving) is passed over; if nothing else matches, its reason is the error. Raises CheckpointError.
    """
    matches = sorted(host.glob(pattern), key=lambda facts: (facts.mtime_ns, facts.path), reverse=True)
    if not matches:
        raise CheckpointError(
            f"[{host.name}] nothing matches {pattern}.", "Check the path or pattern, and that training has saved."
        )
    reasons: list[str] = []
    for facts in (one for match in matches for one in checkpoints_in(host, match)):
        reason = _why_incomplete(host, facts, settle_s)
        if reason is None:
            return _describe(host, facts, name)
        log.info("[%s] passed over %s: %s", host.name, facts.path, reason)
        reasons.append(reason if str(facts.path) in reason else f"{facts.path}: {reason}")
    others = f" ({len(reasons) - 1} older ones are not complete either)" if len(reasons) > 1 else ""
    raise CheckpointError(
        f"[{host.name}] no complete checkpoint: {reasons[0]}{others}",
        "If it is still being written, wait and run again; else it is damaged or no checkpoint at all.",
    )


def _why_incomplete(host: Host, facts: FileFacts, settle_s: float) -> str | None:
    if facts.is_dir:
        has_config = host.stat(facts.path / "config.json") is not None
        has_weights = bool(host.glob(f"{literal_pattern(facts.path)}/*.safetensors"))
        return None if has_config and has_weights else "a directory without config.json and safetensors."
    with host.open_source(facts.path) as source:
        reason = describe_completeness(source)
    if reason is not None:
        return reason
    if time.time() - facts.mtime_ns / 1e9 < FRESH_S:
        time.sleep(settle_s)
        later = host.stat(facts.path)
        if later is None or (later.size_bytes, later.mtime_ns) != (facts.size_bytes, facts.mtime_ns):
            return "it is still being written."
    return None


def _describe(host: Host, facts: FileFacts, name: str | None) -> RemoteDrafter:
    if facts.is_dir:
        return _describe_directory(host, facts.path, name)
    with host.open_source(facts.path) as source:
        file = read_torch_file(source)
        digest, plain = file.content_digest(), file.plain()
    return RemoteDrafter(
        name=name or checkpoint_name(facts.path),
        host=host.name,
        path=str(facts.path),
        form=TORCH,
        files=((facts.path.name, facts.size_bytes),),
        digest=digest,
        step=step_of(plain),
        tokenizer_sha256=None,
    )


def _describe_directory(host: Host, path: PurePosixPath, name: str | None) -> RemoteDrafter:
    found: dict[str, FileFacts] = {}
    for pattern in DIRECTORY_FILES:
        found |= {facts.path.name: facts for facts in host.glob(f"{literal_pattern(path)}/{pattern}") if not facts.is_dir}
    digests = {file: host.sha256(facts.path) for file, facts in sorted(found.items())}
    config = read_config(host, path / "config.json")
    step = config.get("training_step")
    weights = {file: digest for file, digest in digests.items() if file != "tokenizer.json"}
    return RemoteDrafter(
        name=name or path.name,
        host=host.name,
        path=str(path),
        form=DIRECTORY,
        files=tuple((file, facts.size_bytes) for file, facts in sorted(found.items()) if file in weights),
        digest=json_digest(weights),
        step=step if isinstance(step, int) else None,
        tokenizer_sha256=digests.get("tokenizer.json"),
    )


def read_config(host: Host, path: PurePosixPath) -> dict[str, Any]:
    """A config.json on `host`. Raises InputError where it is not a JSON object."""
    content = b""
    for block in host.read_blocks(path):
        content += block
        if len(content) > MAX_CONFIG_BYTES:
            raise InputError(
                f"[{host.name}] {path} is larger than {MAX_CONFIG_BYTES} bytes.", "That is no config file; check the path."
            )
    try:
        config = json.loads(content)
    except ValueError as exc:
        raise InputError(f"[{host.name}] {path} is not JSON: {exc}.", "Correct the file.") from exc
    if not isinstance(config, dict):
        raise InputError(f"[{host.name}] {path} is not a JSON object.", "Correct the file.")
    return config


def incoming_path(drafter: RemoteDrafter, host: Host) -> PurePosixPath:
    """Where the drafter's files are for `host`: its own place if it lies there, else below incoming/."""
    if drafter.host == host.name:
        return PurePosixPath(drafter.path)
    directory = host.work_dir / "incoming" / drafter.digest[:24]
    return directory / "checkpoint.pt" if drafter.form == TORCH else directory


def has_arrived(drafter: RemoteDrafter, host: Host) -> bool:
    """True when every file of the drafter is in `incoming_path` with its size."""
    for path, size in _targets(drafter, host):
        facts = host.stat(path)
        if facts is None or facts.size_bytes != size:
            return False
    return True


def relay(drafter: RemoteDrafter, source: Host, destination: Host, *, on_bytes: OnBytes) -> int:
    """Bring the drafter's files to `destination`, streamed through here; returns bytes moved. Checks the content's identity.

    Raises CheckpointError where the file changed since it was discovered, StorageError where there is no room.
    """
    if drafter.host == destination.name or has_arrived(drafter, destination):
        return 0
    base = PurePosixPath(drafter.path)
    done = 0

    def report(file_done: int, _size: int) -> None:
        on_bytes(done + file_done, drafter.size_bytes)

    for (name, size), (to, _) in zip(drafter.files, _targets(drafter, destination), strict=True):
        path = base if drafter.form == TORCH else base / name
        copy_file(source, path, destination, to, size_bytes=size, sha256=None, on_bytes=report)
        done += size
    _check_identity(drafter, destination)
    return done


def _check_identity(drafter: RemoteDrafter, destination: Host) -> None:
    path = incoming_path(drafter, destination)
    if drafter.form == TORCH:
        with destination.open_source(path) as arrived:
            digest = read_torch_file(arrived).content_digest()
    else:
        digest = json_digest({name: destination.sha256(path / name) for name, _ in drafter.files})
    if digest != drafter.digest:
        destination.remove(path)
        raise CheckpointError(
            f"[{drafter.host}] {drafter.path} changed while it was moved to {destination.name}.",
            "Wait until it is written completely, then run again.",
        )


def drop_incoming(drafter: RemoteDrafter, host: Host) -> None:
    """Remove what `relay` brought, once it has been extracted. The drafter's own place is never touched."""
    if drafter.host != host.name:
        host.remove(host.work_dir / "incoming" / drafter.digest[:24])


def _targets(drafter: RemoteDrafter, host: Host) -> list[tuple[PurePosixPath, int]]:
    path = incoming_path(drafter, host)
    if drafter.form == TORCH:
        return [(path, drafter.files[0][1])]
    return [(path / name, size) for name, size in drafter.files]
