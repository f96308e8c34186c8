"""Drafters where training left them: find the newest complete one, know it by content.

The training host is only ever read. A `.pt` is known by its pickle and the CRC32 of every storage, so its identity
costs a few kilobytes, and so is a torch.distributed.checkpoint by its items; another directory by the sha256 of its files.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from dflash_model.checkpoint.complete import describe_completeness, describe_directory_completeness
from dflash_model.checkpoint.dcp import read_dcp
from dflash_model.checkpoint.dcp_metadata import METADATA_NAME
from dflash_model.checkpoint.step import step_of
from dflash_model.checkpoint.torch_file import read_torch_file
from dflash_model.digests import json_digest
from dflash_model.errors import CheckpointError, InputError
from tasks.remote.host import FileFacts, Host, literal_pattern
from tasks.remote.run_directories import checkpoint_name, checkpoints_in

log = logging.getLogger(__name__)

TORCH, DIRECTORY, DCP = "torch", "directory", "dcp"
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
    """TORCH (one file of torch.save), DIRECTORY (config.json and safetensors) or DCP (a torch.distributed.checkpoint)."""

    files: tuple[tuple[str, int], ...]
    """(name below `path`, size in bytes); for TORCH the one file's own name."""

    digest: str
    """Identity of the content, whatever it is called and wherever it lies."""

    step: int | None
    """Training step that the file tells, None where it does not."""

    tokenizer_sha256: str | None
    """Of the tokenizer.json that comes with a directory."""

    stamps: tuple[tuple[int, int], ...] = ()
    """(inode, modification time in ns) of each of `files` when it was looked at; an inode of 0 tells nothing."""

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
        files, stamps = (tuple((first, second) for first, second in data.get(name, ())) for name in ("files", "stamps"))
        return cls(**data | {"files": files, "stamps": stamps})


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
            return describe(host, facts, name)
        log.info("[%s] passed over %s: %s", host.name, facts.path, reason)
        reasons.append(reason if str(facts.path) in reason else f"{facts.path}: {reason}")
    others = f" ({len(reasons) - 1} older ones are not complete either)" if len(reasons) > 1 else ""
    raise CheckpointError(
        f"[{host.name}] no complete checkpoint: {reasons[0]}{others}",
        "If it is still being written, wait and run again; else it is damaged or no checkpoint at all.",
    )


def _why_incomplete(host: Host, facts: FileFacts, settle_s: float) -> str | None:
    if facts.is_dir:
        form = _form_of(host, facts.path)
        if form == DIRECTORY:
            return None
        if form is None:
            return "a directory with neither config.json and safetensors nor the .metadata of torch.distributed.checkpoint."
        with host.open_directory(facts.path) as directory:
            return describe_directory_completeness(directory)
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


def _form_of(host: Host, path: PurePosixPath) -> str | None:
    """DIRECTORY, DCP, or None for a directory that is neither."""
    if host.stat(path / "config.json") is not None and host.glob(f"{literal_pattern(path)}/*.safetensors"):
        return DIRECTORY
    return DCP if host.stat(path / METADATA_NAME) is not None else None


def describe(host: Host, facts: FileFacts, name: str | None) -> RemoteDrafter:
    """The complete drafter at a path that was just looked at. Raises CheckpointError, HostError."""
    if facts.is_dir and _form_of(host, facts.path) == DCP:
        return _describe_dcp(host, facts.path, name)
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
        stamps=((facts.inode, facts.mtime_ns),),
    )


def _describe_dcp(host: Host, path: PurePosixPath, name: str | None) -> RemoteDrafter:
    with host.open_directory(path) as directory:
        table = read_dcp(directory)
        digest, plain = table.content_digest(), table.plain()
        names = [METADATA_NAME, *table.shard_names()]
    found = [facts for file in names if (facts := host.stat(path / file)) is not None]
    return RemoteDrafter(
        name=name or path.name,
        host=host.name,
        path=str(path),
        form=DCP,
        files=tuple((facts.path.name, facts.size_bytes) for facts in found),
        digest=digest,
        step=step_of(plain),
        tokenizer_sha256=None,
        stamps=tuple((facts.inode, facts.mtime_ns) for facts in found),
    )


def _describe_directory(host: Host, path: PurePosixPath, name: str | None) -> RemoteDrafter:
    found: dict[str, FileFacts] = {}
    for pattern in DIRECTORY_FILES:
        found |= {facts.path.name: facts for facts in host.glob(f"{literal_pattern(path)}/{pattern}") if not facts.is_dir}
    digests = {file: host.sha256(facts.path) for file, facts in sorted(found.items())}
    config = read_config(host, path / "config.json")
    step = config.get("training_step")
    weights = {file: digest for file, digest in digests.items() if file != "tokenizer.json"}
    moved = [facts for file, facts in sorted(found.items()) if file in weights]
    return RemoteDrafter(
        name=name or path.name,
        host=host.name,
        path=str(path),
        form=DIRECTORY,
        files=tuple((facts.path.name, facts.size_bytes) for facts in moved),
        digest=json_digest(weights),
        step=step if isinstance(step, int) else None,
        tokenizer_sha256=digests.get("tokenizer.json"),
        stamps=tuple((facts.inode, facts.mtime_ns) for facts in moved),
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
