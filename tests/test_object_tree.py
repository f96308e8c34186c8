"""Where tensors stand in an object: paths, order, and walks that end."""

import pickle
from pathlib import Path

import pytest
import torch

from dflash_model.checkpoint.object_tree import MAX_DEPTH, find_tensors
from dflash_model.checkpoint.source import LocalFile
from dflash_model.checkpoint.symbolic import load_symbolic
from dflash_model.checkpoint.symbols import Key, Node
from dflash_model.checkpoint.torch_container import open_container
from dflash_model.checkpoint.torch_file import read_torch_file
from dflash_model.errors import CheckpointError
from tests.checkpoint_files import save


def test_paths_and_order_are_the_files(tmp_path: Path) -> None:
    saved = {"b": [torch.ones(1), {"x": torch.ones(2)}], "a": (torch.ones(3),), 7: {None: torch.ones(4)}}
    root = open_container(LocalFile(save(saved, tmp_path / "c.pt"))).root
    found = find_tensors(root, "x")
    assert {path: geometry.shape[0] for path, geometry in found.readable.items()} == {
        ("b", "0"): 1, ("b", "1", "x"): 2, ("a", "0"): 3, ("7", "None"): 4,
    }  # fmt: skip
    assert list(found.readable) == [("b", "0"), ("b", "1", "x"), ("a", "0"), ("7", "None")]


def test_dict_and_list_subclasses_are_walked(tmp_path: Path) -> None:
    tensor = open_container(LocalFile(save(torch.ones(2), tmp_path / "c.pt"))).root
    table, row = Node(None, ()), Node(None, ())
    table.pairs, row.items = [("w", tensor), (Key(3), row)], [tensor]
    assert list(find_tensors(table, "x").readable) == [("w",), ("3", "0")]


def test_a_walk_ends_where_objects_do_not(tmp_path: Path) -> None:
    tensor = open_container(LocalFile(save(torch.ones(2), tmp_path / "c.pt"))).root
    ring = {"w": tensor}
    ring["self"] = ring
    found = find_tensors(ring, "x").readable
    assert ("w",) in found
    assert max(map(len, found)) == MAX_DEPTH
    unfolding: list[object] = [tensor]
    for _ in range(20):
        unfolding = [unfolding] * 10
    with pytest.raises(CheckpointError, match="beyond reason"):
        find_tensors(unfolding, "The file")


def test_long_lists_of_numbers_are_no_reason_to_refuse() -> None:
    losses = load_symbolic(pickle.dumps({"losses": [0.1] * 1_000_000}), what="x")
    assert find_tensors(losses, "x").readable == {}


def test_two_keys_that_read_the_same_are_not_mixed_up(tmp_path: Path) -> None:
    saved = {1: torch.zeros(1), "1": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b": torch.ones(2)}
    file = read_torch_file(LocalFile(save(saved, tmp_path / "c.pt")))
    assert "twice" in file.refused()["1",].reason
    assert [(path, entry.shape) for path, entry in file.by_path().items()] == [(("a", "b"), (1,)), (("a.b",), (2,))]
