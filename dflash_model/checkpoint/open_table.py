"""Which reader a checkpoint needs, from its first bytes or its file names; extensions are not believed."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from dflash_model.checkpoint.dcp import read_dcp
from dflash_model.checkpoint.dcp_metadata import METADATA_NAME
from dflash_model.checkpoint.directory import ByteDirectory
from dflash_model.checkpoint.safetensors_file import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    SafetensorsSet,
    read_safetensors_set,
)
from dflash_model.checkpoint.source import ByteSource
from dflash_model.checkpoint.table import TensorTable
from dflash_model.checkpoint.torch_file import read_torch_file
from dflash_model.errors import CheckpointError


def looks_like_safetensors(source: ByteSource) -> bool:
    """Whether the file starts as safetensors does: a small header size, then a JSON object."""
    head = source.read_at(0, min(9, source.size_bytes))
    # Asked before the pickle's first byte, 0x80, which may well be the lowest byte of a header size.
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def open_table(source: ByteSource) -> TensorTable[Any]:
    """Index one checkpoint file. Raises CheckpointError where it is of no known format, incomplete or refused."""
    if looks_like_safetensors(source):
        return SafetensorsSet(source.name, {PurePosixPath(source.name).name: source})
    return read_torch_file(source)


def open_directory_table(directory: ByteDirectory) -> TensorTable[Any]:
    """Index a checkpoint directory: safetensors (single or sharded) or torch.distributed.checkpoint. Raises CheckpointError."""
    names = directory.names()
    if SINGLE_NAME in names or INDEX_NAME in names:
        return read_safetensors_set(directory)
    if METADATA_NAME in names:
        return read_dcp(directory)
    raise CheckpointError(
        f"{directory.name} holds neither {SINGLE_NAME}, {INDEX_NAME} nor {METADATA_NAME}.",
        "Give the directory of a complete checkpoint, or the path of a checkpoint file.",
    )
