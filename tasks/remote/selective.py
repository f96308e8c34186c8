"""The selective relay: the drafter's tensors alone go from the training host to another, straight into a safetensors file.

The index is read from here; the tensors' bytes pass through, checked and cast, and are never on this machine's disk. On the
other host they fill `model.safetensors.<relay>.part`, which is hashed there before it gets its name; `extracted.json` comes
last. What arrived before a break, or before this process was killed, is not fetched again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from pathlib import Path, PurePosixPath

from dflash_model.checkpoint.extract import ExtractPlan, plan_extraction
from dflash_model.checkpoint.extracted import EXTRACTED_NAME, WEIGHTS_NAME, Extracted
from dflash_model.checkpoint.open_table import open_directory_table, open_table
from dflash_model.checkpoint.safetensors_writer import WrittenFile
from dflash_model.errors import Cancelled, CheckpointError, EvalError, SourceChanged, StorageError
from tasks.remote.drafters import DIRECTORY, TORCH, RemoteDrafter, describe
from tasks.remote.failures import ended_on_request
from tasks.remote.host import Host
from tasks.remote.incoming import incoming_path, read_extracted, sweep_incoming
from tasks.remote.journal import Journal, Span, open_journal, relay_id
from tasks.remote.origin import WAIT, Origin
from tasks.remote.part import Part
from tasks.remote.processes import ending
from tasks.remote.range_transfer import RangeTransfer, split_pieces
from tasks.remote.selection import Selection
from tasks.remote.transfer import OnBytes, copy_file, remove_quietly, require_room

log = logging.getLogger(__name__)

FRESH_STARTS = 3
CRC32, SHA256, UNCHECKED = "crc32", "sha256", "unchecked"
"""How the bytes read were compared with the source: its own checksums; hashed there again; its host cannot hash."""


def relay(
    drafter: RemoteDrafter, selection: Selection, source: Host, destination: Host, *, journals: Path, on_bytes: OnBytes
) -> Extracted | None:
    """Bring the selected tensors to `incoming_path` on `destination`, and what else an extraction there needs.

    `journals`: directory of this relay for the notes of its transfers. None where the drafter lies there anyway. Raises
    SourceChanged where it is not any more what was discovered, CheckpointError, HostFull, StorageError, HostError, Cancelled.
    """
    if drafter.host == destination.name:
        return None
    what = f"[{drafter.host}] moving {drafter.path} to {destination.name}"

    def check() -> None:
        if ending():
            raise ended_on_request(what)

    name = f"{selection.name_for(drafter.digest)}-{destination.name}"
    with open_journal(journals, name, check=check) as journal:
        arrived = read_extracted(drafter, selection, destination)
        if arrived is not None:
            return arrived
        sweep_incoming(destination, keep=incoming_path(drafter, selection, destination))
        for start in range(1, FRESH_STARTS + 1):
            one = _Transfer(drafter, selection, source, destination, journal, relay_id(journals), on_bytes=on_bytes, check=check)
            try:
                return one.run()
            except CheckpointError as exc:
                one.clear()
                is_still = _is_still(drafter, source)
                if is_still and not isinstance(exc, SourceChanged):
                    raise  # damaged, or not what can be read: it would be so again
                if start == FRESH_STARTS or not is_still:
                    raise SourceChanged(
                        f"{exc.problem} It is not the checkpoint any more that was found there.",
                        "The run looks for it again; if this repeats, wait until training has finished writing it.",
                    ) from exc
                log.warning("%s starts again, its content is the same: %s", what, exc.problem)
            except StorageError:
                one.clear()
                raise
    raise AssertionError("the loop returns or raises")


def plan_size(drafter: RemoteDrafter, selection: Selection, source: Host) -> int:
    """How many bytes `relay` would write on the destination, from the index alone. Raises EvalError."""
    with Origin(source, PurePosixPath(drafter.path), is_dir=drafter.form != TORCH, check=lambda: None) as origin:
        plan = _plan(drafter, selection, origin)
        beside = _beside(drafter, origin)
        return plan.size_bytes + sum(size for name, size in drafter.files if name in beside)


def _plan(drafter: RemoteDrafter, selection: Selection, origin: Origin) -> ExtractPlan:
    table = open_table(origin.open_single()) if drafter.form == TORCH else open_directory_table(origin)
    return plan_extraction(table, key=selection.state_key, cast=selection.cast, keep_vocab=selection.keep_vocab)


def _beside(drafter: RemoteDrafter, origin: Origin) -> frozenset[str]:
    """Files of a directory that the plan has not opened: what is no shard, a config above all. They are moved as they are."""
    return frozenset(name for name, _ in drafter.files) - origin.opened if drafter.form == DIRECTORY else frozenset()


def _is_still(drafter: RemoteDrafter, source: Host) -> bool:
    """Whether the path has the content that was discovered there, whatever happened to the file."""
    try:
        facts = source.stat(PurePosixPath(drafter.path))
        return facts is not None and describe(source, facts, None).digest == drafter.digest
    except CheckpointError:
        return False


class _Transfer:
    """One attempt, from the index to the last rename."""

    def __init__(
        self,
        drafter: RemoteDrafter,
        selection: Selection,
        source: Host,
        destination: Host,
        journal: Journal,
        relay: str,
        *,
        on_bytes: OnBytes,
        check: Callable[[], None],
    ) -> None:
        self._drafter, self._selection = drafter, selection
        self._source, self._destination = source, destination
        self._journal, self._relay = journal, relay
        self._on_bytes, self._check = on_bytes, check
        self._directory = incoming_path(drafter, selection, destination)
        self._lock = threading.Lock()
        self._positions: dict[int, int] = {}
        self._parts: list[Part] = []
        self._size_bytes = 0

    def run(self) -> Extracted:
        """Do it. Raises EvalError."""
        began = time.monotonic()
        with ExitStack() as stack:
            origin, plan = self._open(self._source, stack)
            beside = _beside(self._drafter, origin)
            self._require_identity(origin, plan)
            self._size_bytes = plan.size_bytes
            transfers = self._transfers(origin, plan, stack)
            require_room(self._destination, self._missing_bytes(transfers))
            spans = self._fill(transfers)
            origins = [one.origin for one in transfers]
            checked = CRC32 if plan.has_checksums else self._compare_with_source(spans)
            for one in origins:
                one.refuse_change()
            written = self._put_together(transfers, spans)
            self._bring(beside)
            bytes_read = sum(one.bytes_read for one in origins)
            resumed = sum(one.resumed_bytes for one in transfers)
        extracted = Extracted(
            report=plan.report(written, bytes_read),
            transfer={
                "source": {"host": self._drafter.host, "path": self._drafter.path, "size_bytes": self._drafter.size_bytes},
                "selection": self._selection.to_json(),
                "bytes_read": bytes_read,
                "bytes_written": written.size_bytes - resumed,
                "bytes_resumed": resumed,
                "bytes_saved": max(0, self._drafter.size_bytes - bytes_read),
                "checked": checked,
                "connections": len(transfers),
                "seconds": round(time.monotonic() - began, 3),
            },
        )
        self._publish(EXTRACTED_NAME, extracted.to_json())
        self._journal.forget()
        return extracted

    def clear(self) -> None:
        """Remove what the attempt left on the destination, and its notes."""
        for part in self._parts:
            remove_quietly(self._destination, part.path)
        self._journal.forget()

    def _open(self, source: Host, stack: ExitStack) -> tuple[Origin, ExtractPlan]:
        path = PurePosixPath(self._drafter.path)
        origin = stack.enter_context(Origin(source, path, is_dir=self._drafter.form != TORCH, check=self._check))
        plan = _plan(self._drafter, self._selection, origin)
        origin.records = not plan.has_checksums
        return origin, plan

    def _require_identity(self, origin: Origin, plan: ExtractPlan) -> None:
        """Raise SourceChanged unless the files that were opened hold what was discovered."""
        drafter = self._drafter
        if drafter.form == TORCH and plan.has_checksums:
            same = plan.table.content_digest() == drafter.digest
        else:
            now = tuple(origin.open(name).identity for name, _ in drafter.files)
            then = tuple((inode, size, at) for (_, size), (inode, at) in zip(drafter.files, drafter.stamps, strict=False))
            same = (now == then and all(inode for inode, _, _ in now)) or _is_still(drafter, self._source)
        if not same:
            raise SourceChanged(f"[{drafter.host}] {drafter.path} changed since it was found.", WAIT)

    def _transfers(self, origin: Origin, plan: ExtractPlan, stack: ExitStack) -> list[RangeTransfer]:
        """One a connection; each beyond the first has its own to both hosts, and its own index."""
        wanted = max(self._source.connections, self._destination.connections)
        stretches = split_pieces(plan.pieces(), wanted)
        self._journal.resume([(some[0].offset, some[-1].offset + some[-1].size_bytes) for some in stretches])
        transfers = []
        for number, pieces in enumerate(stretches):
            destination = self._destination
            if number:
                source, destination = self._source.beside(), destination.beside()
                stack.callback(source.close)
                stack.callback(destination.close)
                origin, plan = self._open(source, stack)
                begin = pieces[0].offset
                pieces = [one for one in plan.pieces() if begin <= one.offset < begin + sum(p.size_bytes for p in pieces)]
            part = Part(destination, self._part_path(number), check=self._check)
            self._parts.append(part)
            transfers.append(
                RangeTransfer(
                    number,
                    pieces,
                    plan=plan,
                    origin=origin,
                    destination=destination,
                    part=part,
                    journal=self._journal,
                    on_position=self._note,
                )
            )
        return transfers

    def _part_path(self, number: int) -> PurePosixPath:
        ending = f".part{number}" if number else ".part"
        return self._directory / f"{WEIGHTS_NAME}.{self._relay}{ending}"

    def _missing_bytes(self, transfers: Sequence[RangeTransfer]) -> int:
        """What has still to be written, and what joining the parts needs for a moment."""
        there = sum(min(one.part.size(), one.end - one.begin) for one in transfers)
        joining = max((one.end - one.begin for one in transfers[1:]), default=0)
        return self._size_bytes - there + joining

    def _note(self, number: int, done: int) -> None:
        with self._lock:
            self._positions[number] = done
            self._on_bytes(sum(self._positions.values()), self._size_bytes)

    def _fill(self, transfers: Sequence[RangeTransfer]) -> list[Span]:
        """All parts, side by side; the first error ends them all."""
        if len(transfers) == 1:
            return transfers[0].run()
        failed = threading.Event()
        stop = self._check

        def check() -> None:
            stop()
            if failed.is_set():
                raise ended_on_request(f"[{self._drafter.host}] a part of {self._drafter.path}")

        def one_of(transfer: RangeTransfer) -> list[Span]:
            try:
                return transfer.run()
            except EvalError:
                failed.set()
                raise

        for transfer in transfers:
            transfer.watch(check)
        with ThreadPoolExecutor(len(transfers), thread_name_prefix="relay") as pool:
            # Each in a copy of this context, so that who watches still knows which run it is.
            futures = [pool.submit(copy_context().run, one_of, transfer) for transfer in transfers]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, Cancelled)), errors[0])
        return [span for future in futures for span in future.result()]

    def _compare_with_source(self, spans: Sequence[Span]) -> str:
        """Have the source hash what was read of it. Raises CheckpointError where it has something else."""
        reads = {(file, offset, size): digest for span in spans for file, offset, size, digest in span.reads}
        for file in sorted({file for file, _, _ in reads}):
            ranges = [(offset, size) for name, offset, size in reads if name == file]
            path = PurePosixPath(self._drafter.path)
            path = path / file if self._drafter.form != TORCH else path
            found = self._source.range_sha256(path, ranges)
            if found is None:
                log.warning("[%s] has no program for sha256: what came of %s could not be compared", self._source.name, path)
                return UNCHECKED
            for (offset, size), digest in zip(ranges, found, strict=True):
                if digest != reads[file, offset, size]:
                    raise SourceChanged(
                        f"[{self._source.name}] {path} has other bytes from {offset} to {offset + size} than came from there.",
                        WAIT,
                    )
        return SHA256

    def _put_together(self, transfers: Sequence[RangeTransfer], spans: Sequence[Span]) -> WrittenFile:
        """Join the parts, have the destination hash the whole, and give it its name. Raises StorageError where it differs."""
        whole, others = self._parts[0].path, [part.path for part in self._parts[1:]]
        if others:
            self._destination.join(whole, others)
        ranges = [(span.begin, span.end - span.begin) for span in spans]
        found = self._hash_on_destination(whole, [*ranges, (0, self._size_bytes)] if len(ranges) > 1 else ranges)
        for (offset, size), expected, digest in zip(ranges, [span.sha256 for span in spans], found, strict=False):
            if digest != expected:
                raise StorageError(
                    f"{self._drafter.path} from {self._drafter.host} arrived on {self._destination.name} damaged: bytes {offset} to "
                    f"{offset + size} have sha256 {digest[:12]}.., expected {expected[:12]}...",
                    "Run again; if it repeats, check the disk and memory of that host.",
                )
        size = transfers[0].part.size()
        if size != self._size_bytes or sum(size for _, size in ranges) != size:
            raise StorageError(
                f"[{self._destination.name}] {whole} has {size} bytes, not {self._size_bytes}.",
                "Run again; check the disk of that host.",
            )
        self._destination.rename(whole, self._directory / WEIGHTS_NAME)
        return WrittenFile(size_bytes=size, sha256=found[-1])

    def _hash_on_destination(self, path: PurePosixPath, ranges: Sequence[tuple[int, int]]) -> list[str]:
        if ranges == [(0, self._size_bytes)]:
            return [self._destination.sha256(path)]
        found = self._destination.range_sha256(path, ranges)
        return found if found is not None else [self._hash_here(path, offset, size) for offset, size in ranges]

    def _hash_here(self, path: PurePosixPath, offset: int, size: int) -> str:
        """For a destination without a program for it: its bytes come back once."""
        digest = hashlib.sha256()
        for block in self._destination.read_blocks(path, offset=offset):
            digest.update(block[:size])
            size -= min(size, len(block))
            if not size:
                break
        return digest.hexdigest()

    def _bring(self, names: frozenset[str]) -> None:
        for name, size in self._drafter.files:
            if name in names:
                path = PurePosixPath(self._drafter.path) / name
                copy_file(
                    self._source, path, self._destination, self._directory / name, size_bytes=size, sha256=None, on_bytes=_unheard
                )

    def _publish(self, name: str, content: bytes) -> None:
        part = self._directory / f"{name}.{self._relay}.part"
        self._destination.write_blocks(part, [content])
        self._destination.rename(part, self._directory / name)


def _unheard(_done: int, _total: int) -> None:
    return
