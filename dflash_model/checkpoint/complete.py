"""Whether a checkpoint looks complete, as cheaply as its format allows: to pick the newest one that can be used.

None means that nothing speaks against it. Tensors' bytes are not read, so a file that was damaged in place still passes.
"""

from __future__ import annotations

from dflash_model.checkpoint.dcp import DcpCheckpoint
from dflash_model.checkpoint.directory import ByteDirectory
from dflash_model.checkpoint.open_table import looks_like_safetensors, open_directory_table
from dflash_model.checkpoint.safetensors_file import read_safetensors_header
from dflash_model.checkpoint.source import ByteSource
from dflash_model.checkpoint.torch_container import open_container
from dflash_model.checkpoint.torch_zip import LOCAL_MAGIC, read_zip_directory
from dflash_model.errors import CheckpointError


def describe_completeness(source: ByteSource) -> str | None:
    """None if the file looks complete, else a sentence why not. I/O errors are raised as they are.

    zip: end record and directory; legacy: its pickles, and storages inside the file; safetensors: header against size.
    """
    try:
        if looks_like_safetensors(source):
            read_safetensors_header(source, shard="")
        elif source.read_at(0, min(4, source.size_bytes)) == LOCAL_MAGIC:
            read_zip_directory(source)
        else:
            open_container(source)
    except CheckpointError as exc:
        return exc.problem
    return None


def describe_directory_completeness(directory: ByteDirectory) -> str | None:
    """`describe_completeness` of a directory: every shard that the index or .metadata names is there and long enough."""
    try:
        table = open_directory_table(directory)
        if isinstance(table, DcpCheckpoint):
            table.check_extents()
    except CheckpointError as exc:
        return exc.problem
    return None
