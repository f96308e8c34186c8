"""drafter/loading.py: strict, finite, and every tensor of the file reaches the output."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dflash_model.drafter.backbone import Drafter, Group
from dflash_model.drafter.loading import load_drafter
from dflash_model.errors import CheckpointError, InputError
from tests.tiny_drafters import SPEC, random_weights


def written(directory: Path, **changes: torch.Tensor | None) -> Path:
    """A file of random weights with some replaced, added, or dropped (None)."""
    weights: dict[str, torch.Tensor | None] = {**random_weights(SPEC), **changes}
    path = directory / "model.safetensors"
    save_file({name: weight for name, weight in weights.items() if weight is not None}, path)
    return path


def hidden(drafter: Drafter) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(9, 72, generator=generator)
    block = torch.randn(1, 5, 24, generator=generator)
    return drafter(block, [Group(context=drafter.make_context(states), anchors=(9,))])


def test_every_tensor_of_the_file_reaches_the_output(tmp_path: Path) -> None:
    right = hidden(load_drafter(written(tmp_path), SPEC))
    for name, weight in random_weights(SPEC).items():
        bent = weight.clone()
        bent.view(-1)[0] += 2.0
        assert not torch.equal(hidden(load_drafter(written(tmp_path, **{name: bent}), SPEC)), right), name


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_computed_in_fp32(stored: torch.dtype, tmp_path: Path) -> None:
    halves = {name: weight.to(stored) for name, weight in random_weights(SPEC).items()}
    drafter = load_drafter(written(tmp_path, **halves), SPEC)
    assert drafter.dtype == torch.float32
    upcast = load_drafter(written(tmp_path, **{name: weight.float() for name, weight in halves.items()}), SPEC)
    assert torch.equal(hidden(drafter), hidden(upcast))
    assert not torch.equal(hidden(drafter), hidden(load_drafter(written(tmp_path), SPEC)))


def test_the_compute_type_is_the_callers(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert hidden(load_drafter(path, SPEC, dtype=torch.float64)).dtype == torch.float64
    rough, fine = hidden(load_drafter(path, SPEC, dtype=torch.bfloat16)), hidden(load_drafter(path, SPEC))
    assert rough.dtype == torch.bfloat16
    assert 0 < float((rough.float() - fine).abs().max()) < 0.3
    with pytest.raises(ValueError, match="float16"):
        load_drafter(path, SPEC, dtype=torch.float16)


def test_nothing_is_left_on_the_meta_device_or_trainable(tmp_path: Path) -> None:
    drafter = load_drafter(written(tmp_path), SPEC)
    tensors = [*drafter.parameters(), *drafter.buffers()]
    assert len(tensors) == 3 + 11 * 2
    assert all(t.device.type == "cpu" and not t.requires_grad for t in tensors)
    assert drafter.name == str(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm.weight": None}, "lacks 1 of the drafter's tensors: norm.weight"),
        ({"layers.2.mlp.up_proj.weight": torch.ones(2)}, r"holds 1 tensors that the drafter does not use: layers\.2\.mlp"),
        ({"fc.weight": torch.ones(24, 48)}, r"fc.weight in .* has shape \[24, 48\], but the config asks for \[24, 72\]"),
        ({"fc.weight": torch.ones(24, 72, dtype=torch.int8)}, "fc.weight in .* is stored as int8"),
        ({"fc.weight": torch.ones(24, 72).to(torch.float8_e4m3fn)}, "fc.weight in .* is stored as float8_e4m3fn"),
        ({"hidden_norm.weight": torch.full((24,), torch.nan)}, "hidden_norm.weight in .* holds NaN or infinite"),
        ({"layers.1.mlp.up_proj.weight": torch.full((40, 24), torch.inf)}, "layers.1.mlp.up_proj.weight in .* holds NaN or"),
        ({"norm.weight": torch.full((24,), 1e300, dtype=torch.float64)}, "norm.weight in .* holds NaN or infinite"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(changes: dict[str, torch.Tensor | None], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_drafter(written(tmp_path, **changes), SPEC)


def test_a_cut_file_and_a_missing_one_are_told_apart(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_drafter(path, SPEC)
    with pytest.raises(InputError, match="Not found while reading"):
        load_drafter(tmp_path / "none.safetensors", SPEC)
