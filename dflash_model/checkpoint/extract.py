"""From any checkpoint to one `model.safetensors` of the drafter's tensors: read selectively, checked, cast if asked.

Only the wanted tensors' storages are read; optimizer states are skipped, not copied. A damaged storage is noticed before
the file gets its name. The plan (`plan_extraction`) also serves a relay that streams to another host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dflash_model.checkpoint.directory import ByteDirectory, CountedDirectory, LocalDirectory
from dflash_model.checkpoint.dtypes import CAST_TO_BF16, to_bf16
from dflash_model.checkpoint.open_table import open_directory_table, open_table
from dflash_model.checkpoint.safetensors_writer import (
    OutgoingPiece,
    OutgoingTensor,
    WrittenFile,
    safetensors_pieces,
    safetensors_stream,
    stream_size,
    write_safetensors,
)
from dflash_model.checkpoint.source import ByteSource, CountedSource, refuse_change
from dflash_model.checkpoint.state_dict import StateDict, select_state_dict
from dflash_model.checkpoint.table import TensorTable
from dflash_model.checkpoint.vocabulary_map import without_marks

Cast = Literal["keep", "bf16"]
METADATA = {"format": "pt"}
"""What transformers wants to see in the header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractReport:
    """What was taken out of a checkpoint, and what was not."""

    format: str
    """ "torch-zip", "torch-legacy", "dcp" or "safetensors"."""

    tensors: int
    """Tensors written."""

    bytes_read: int
    """Bytes read from the source, index and checks included."""

    bytes_written: int
    """Size of the file written."""

    bytes_skipped: int
    """Bytes of the source that were never read (0 where more was read than it has, for checks)."""

    sha256: str
    """Of the file written."""

    key_path: str
    """Dotted path of the state dict; "" for the top level."""

    prefixes: tuple[str, ...]
    """Prefixes that were stripped from the names."""

    renamed: dict[str, str]
    """Name written -> name in the checkpoint, where the spelling differs."""

    dropped: dict[str, str]
    """Name in the checkpoint -> why it was left out."""

    dtypes: dict[str, int]
    """safetensors dtype name -> number of tensors written with it."""

    facts: dict[str, Any]
    """The plain data beside the tensors (step, epoch, arguments) as a JSON object; {} where the file is no dict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtractPlan:
    """What will be written, before a tensor's byte is read. The stream may go to any place, also to another host."""

    table: TensorTable[Any]
    """The checkpoint."""

    state: StateDict[Any]
    """The drafter's tensors in it."""

    tensors: tuple[OutgoingTensor, ...]
    """The same, as they will be written."""

    facts: dict[str, Any]
    """The plain data beside the tensors; {} where the file is no dict."""

    @property
    def size_bytes(self) -> int:
        """Size of the file that `stream` makes."""
        return stream_size(self.tensors, METADATA)

    def stream(self) -> Iterator[bytes]:
        """The bytes of `model.safetensors`. Raises CheckpointError, at the latest after a damaged tensor's last block.

        Whoever sends it elsewhere must not give the file its name before the stream has ended.
        """
        return safetensors_stream(self.tensors, METADATA)

    def pieces(self) -> list[OutgoingPiece]:
        """The same file as pieces: the header, then each tensor, in the file's order."""
        return safetensors_pieces(self.tensors, METADATA)

    def blocks(self, pieces: Sequence[OutgoingPiece]) -> Iterator[bytes]:
        """The bytes of some of `pieces()`, their reads foreseen. Raises CheckpointError as `stream` does."""
        self.table.foresee([self.state.tensors[piece.name] for piece in pieces if piece.name is not None])
        for piece in pieces:
            yield from piece.blocks()

    @property
    def has_checksums(self) -> bool:
        """Whether every byte that will be read of a tensor is compared with a checksum of the checkpoint's own."""
        return self.table.has_checksums(list(self.state.tensors.values()))

    def report(self, written: WrittenFile, bytes_read: int) -> ExtractReport:
        """The report on a file that was written from this plan."""
        return ExtractReport(
            format=self.table.format,
            tensors=len(self.tensors),
            bytes_read=bytes_read,
            bytes_written=written.size_bytes,
            bytes_skipped=max(0, self.table.size_bytes - bytes_read),
            sha256=written.sha256,
            key_path=self.state.key_path,
            prefixes=self.state.prefixes,
            renamed=self.state.renamed,
            dropped=self.state.dropped,
            dtypes=dict(sorted(Counter(tensor.dtype for tensor in self.tensors).items())),
            facts=self.facts,
        )


def plan_extraction(
    table: TensorTable[Any], *, key: str | None = None, cast: Cast = "keep", keep_vocab: bool = False
) -> ExtractPlan:
    """Choose the drafter's tensors and look up where they lie. Raises CheckpointError as `select_state_dict` does.

    The one tensor that is read already is t2d, which is compared with d2t and then left out.

    `cast="bf16"` rounds F32, F16 and F64 to nearest even, as torch does; every other dtype is kept.
    """
    if cast not in ("keep", "bf16"):
        raise ValueError(f"cast {cast!r}")
    state = without_marks(table, select_state_dict(table, key, keep_vocab=keep_vocab))
    table.prepare(list(state.tensors.values()))
    tensors = tuple(_outgoing(table, name, entry=entry, cast=cast) for name, entry in state.tensors.items())
    plain = table.plain()
    return ExtractPlan(table=table, state=state, tensors=tensors, facts=plain if isinstance(plain, dict) else {})


def _outgoing(table: TensorTable[Any], name: str, *, entry: Any, cast: Cast) -> OutgoingTensor:
    if cast == "bf16" and entry.dtype in CAST_TO_BF16:
        return OutgoingTensor(name=name, dtype="BF16", shape=entry.shape, blocks=partial(_cast_blocks, table, entry))
    return OutgoingTensor(name=name, dtype=entry.dtype, shape=entry.shape, blocks=partial(table.blocks, entry))


def _cast_blocks(table: TensorTable[Any], entry: Any) -> Iterator[bytes]:
    for block in table.blocks(entry):
        yield to_bf16(block, entry.dtype)


def extract_weights(
    file_source: ByteSource, destination: Path, *, key: str | None = None, cast: Cast = "keep", keep_vocab: bool = False
) -> ExtractReport:
    """Write the drafter's tensors of one file (torch.save zip or legacy, safetensors) to `destination`, a safetensors file.

    `key`: dotted path of the state dict where several could be meant. Raises EvalError; on error no file is left.
    """
    counted = CountedSource(file_source)
    plan = plan_extraction(open_table(counted), key=key, cast=cast, keep_vocab=keep_vocab)
    written = write_safetensors(destination, plan.tensors, metadata=METADATA, verify=lambda: refuse_change(counted))
    return plan.report(written, counted.bytes_read)


def extract_weights_from_dir(
    path: Path, destination: Path, *, key: str | None = None, cast: Cast = "keep", keep_vocab: bool = False
) -> ExtractReport:
    """`extract_weights` for a local directory: model.safetensors, its shards, or a torch.distributed.checkpoint."""
    with LocalDirectory(path) as directory:
        return extract_directory(directory, destination, key=key, cast=cast, keep_vocab=keep_vocab)


def extract_directory(
    directory: ByteDirectory, destination: Path, *, key: str | None = None, cast: Cast = "keep", keep_vocab: bool = False
) -> ExtractReport:
    """`extract_weights_from_dir` for any directory whose files can be read as sources. Raises EvalError."""
    counted = CountedDirectory(directory)
    plan = plan_extraction(open_directory_table(counted), key=key, cast=cast, keep_vocab=keep_vocab)
    verify = partial(_refuse_changes, counted)
    written = write_safetensors(destination, plan.tensors, metadata=METADATA, verify=verify)
    return plan.report(written, counted.bytes_read)


def _refuse_changes(directory: CountedDirectory) -> None:
    for source in directory.opened.values():
        refuse_change(source)
