"""Checkpoint directories: plain names only, each file opened once."""

from pathlib import Path

import pytest

from dflash_model.checkpoint.directory import CountedDirectory, LocalDirectory, check_plain_name
from dflash_model.errors import CheckpointError


def test_files_are_listed_and_opened_once(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"bb")
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "inner").mkdir()
    with LocalDirectory(tmp_path) as directory:
        assert directory.names() == ["a", "b"]
        assert directory.open("b") is directory.open("b")
        assert directory.open("b").read_at(0, 2) == b"bb"
        with pytest.raises(CheckpointError, match="There is no checkpoint at"):
            directory.open("c")


def test_reads_are_counted_over_all_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "b").write_bytes(b"12")
    with LocalDirectory(tmp_path) as inner:
        counted = CountedDirectory(inner)
        counted.open("a").read_at(0, 3)
        counted.open("a").read_at(0, 1)
        counted.open("b").read_at(0, 2)
        assert (counted.bytes_read, counted.names()) == (6, ["a", "b"])


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint directory"):
        LocalDirectory(tmp_path / "absent").names()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "a\\b", "", ".", "..", "a\0b", 7, None])
def test_names_that_lead_elsewhere_are_refused(name: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a plain file name"):
        check_plain_name(name, "The index")
    if isinstance(name, str):
        with pytest.raises(CheckpointError, match="not a plain file name"):
            LocalDirectory(tmp_path).open(name)
    assert check_plain_name("__0_0.distcp", "The index") == "__0_0.distcp"
