"""Element types: sizes as torch has them, and a bf16 cast that equals torch's."""

import numpy as np
import pytest
import torch

from dflash_model.checkpoint.dtypes import FROM_STORAGE, FROM_TORCH, ITEM_BYTES, STORAGE_ITEM_BYTES, as_integers, to_bf16
from tests.checkpoint_files import bytes_of


@pytest.mark.parametrize("name", FROM_TORCH)
def test_item_sizes_equal_torchs(name: str) -> None:
    assert ITEM_BYTES[FROM_TORCH[name]] == torch.empty(0, dtype=getattr(torch, name)).element_size()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", FROM_STORAGE)
def test_storage_names_mean_what_torch_means(name: str) -> None:
    dtype = getattr(torch, name).dtype
    assert FROM_STORAGE[name] == FROM_TORCH[str(dtype).removeprefix("torch.")]
    assert STORAGE_ITEM_BYTES[name] == torch.empty(0, dtype=dtype).element_size()


def interesting_bits() -> torch.Tensor:
    """Every sign and exponent with mantissas around each rounding boundary, and random bits."""
    high = np.arange(0, 1 << 16, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    rng = np.random.default_rng(0)
    bits = np.concatenate([(high | low).ravel(), rng.integers(0, 1 << 32, 100_000, dtype=np.uint32)])
    return torch.from_numpy(bits.view(np.float32))


def assert_same_bf16(ours: bytes, theirs: torch.Tensor) -> None:
    found = torch.frombuffer(bytearray(ours), dtype=torch.int16)
    nan = torch.isnan(theirs)
    assert torch.equal(found[~nan], theirs.view(torch.int16)[~nan])
    assert bool((found[nan] == 0x7FC0).all())


def test_float32_rounds_as_torch_does_for_every_exponent_and_boundary() -> None:
    values = interesting_bits()
    assert_same_bf16(to_bf16(bytes_of(values), "F32"), values.bfloat16())
    truncated = (values.view(torch.int32) >> 16).to(torch.int16)
    assert not torch.equal(truncated, values.bfloat16().view(torch.int16))  # cutting off would differ


def test_float16_and_float64_round_as_torch_does() -> None:
    halves = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    assert_same_bf16(to_bf16(bytes_of(halves), "F16"), halves.bfloat16())
    doubles = torch.cat([interesting_bits().double(), torch.tensor([1e300, -1e300, 1e-300, 1 + 2**-8 + 2**-40])])
    assert_same_bf16(to_bf16(bytes_of(doubles), "F64"), doubles.bfloat16())


def test_no_bytes_are_no_elements() -> None:
    assert to_bf16(b"", "F32") == b""
    assert as_integers(b"\x01\x02\x03\x04", 2).tolist() == [0x0201, 0x0403]
