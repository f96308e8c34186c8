"""The streaming writer: what it writes, the format's own library reads; what fails leaves nothing."""

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_model.checkpoint.dtypes import FROM_TORCH
from dflash_model.checkpoint.safetensors_file import SafetensorsSet
from dflash_model.checkpoint.safetensors_writer import OutgoingTensor, safetensors_stream, stream_size, write_safetensors
from dflash_model.checkpoint.source import LocalFile
from dflash_model.errors import CheckpointError, InputError, StorageError
from tests.checkpoint_files import DTYPES, bytes_of


def outgoing(name: str, value: torch.Tensor, *, step: int = 7) -> OutgoingTensor:
    data = bytes_of(value)
    blocks = partial(lambda: iter([data[i : i + step] for i in range(0, len(data), step)]))
    return OutgoingTensor(
        name=name, dtype=FROM_TORCH[str(value.dtype).removeprefix("torch.")], shape=tuple(value.shape), blocks=blocks
    )


def everything() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"t.{str(dtype)[6:]}": (torch.randn(3, 3) * 9).to(dtype) for dtype in DTYPES} | {
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(2, 0),
        "ü\n": torch.ones(1),
    }


def test_the_formats_own_library_reads_it_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model.safetensors"
    found = write_safetensors(path, [outgoing(*item) for item in everything().items()], metadata={"format": "pt"})
    loaded = load_file(path)
    assert {name: bytes_of(value) for name, value in loaded.items()} == {name: bytes_of(v) for name, v in everything().items()}
    assert {name: (value.dtype, value.shape) for name, value in loaded.items()} == {
        name: (value.dtype, value.shape) for name, value in everything().items()
    }
    assert found.size_bytes == path.stat().st_size
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [one.name for one in path.parent.iterdir()] == ["model.safetensors"]


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_safetensors(path, [outgoing(*item) for item in everything().items()], metadata={"odd": "x"})
    found = SafetensorsSet("f", {"f": LocalFile(path)})
    items = {name: value.element_size() for name, value in everything().items()}
    assert [name for name, entry in found.tensors().items() if entry.offset % items[name]] == []
    by_name = sorted(everything())  # the plain order would not be aligned
    offsets = [sum(len(bytes_of(everything()[name])) for name in by_name[:i]) for i in range(len(by_name))]
    assert any(offset % items[name] for name, offset in zip(by_name, offsets, strict=True))


def test_the_bytes_do_not_depend_on_the_order_given_and_equal_the_librarys(tmp_path: Path) -> None:
    values = {f"layer.{i}": torch.full((2,), float(i)) for i in (3, 11, 2)}
    tensors = [outgoing(*item) for item in values.items()]
    stream = b"".join(safetensors_stream(tensors, {"format": "pt"}))
    assert stream == b"".join(safetensors_stream(tensors[::-1], {"format": "pt"}))
    assert len(stream) == stream_size(tensors, {"format": "pt"})
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})
    assert stream == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize(("size", "fault"), [(11, "1 bytes less"), (13, "more")])
def test_a_tensor_of_the_wrong_length_leaves_no_file(tmp_path: Path, size: int, fault: str) -> None:
    wrong = OutgoingTensor(name="w", dtype="F32", shape=(3,), blocks=lambda: [bytes(size)])
    with pytest.raises(CheckpointError, match=f"w yields {fault}"):
        write_safetensors(tmp_path / "f", [wrong], metadata={})
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_reading_leaves_the_old_file(tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield bytes(4)
        raise CheckpointError("The source broke.", "Mend it.")

    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(CheckpointError, match="The source broke"):
        write_safetensors(tmp_path / "f", [OutgoingTensor(name="w", dtype="F32", shape=(3,), blocks=failing)], metadata={})
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("f", b"old")]


def test_a_failed_verification_leaves_no_file(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def verify() -> None:
        seen.append([one.name for one in tmp_path.iterdir()])
        raise CheckpointError("It changed.", "Wait.")

    with pytest.raises(CheckpointError, match="It changed"):
        write_safetensors(tmp_path / "f", [outgoing("w", torch.ones(2))], metadata={}, verify=verify)
    assert len(seen) == 1
    assert seen[0][0].startswith("f.part-")
    assert list(tmp_path.iterdir()) == []


def test_one_name_twice_is_the_callers_mistake() -> None:
    for names in (("a", "a"), ("__metadata__",)):
        with pytest.raises(ValueError, match="two tensors of one name"):
            list(safetensors_stream([outgoing(name, torch.ones(1)) for name in names], {}))


def test_a_disk_that_refuses_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((InputError, StorageError)):
        write_safetensors(tmp_path / "file" / "f", [outgoing("w", torch.ones(1))], metadata={})
