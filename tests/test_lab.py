"""The lab program: what it refuses to touch, without root and without a host."""

from pathlib import Path

import pytest
from lab import Lab, LabHost
from namespaces import PREFIX


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("data")
    with pytest.raises(RuntimeError, match="holds something that is not a lab"):
        Lab(tmp_path).up()
    assert (tmp_path / "precious").read_text() == "data"


def test_hosts_have_addresses_and_names_that_the_kernel_takes() -> None:
    for number, name in enumerate(("train", "eval", "gpu-a", "gpu-b", "inner"), 1):
        host = LabHost(name=name, number=number)
        assert host.address == f"10.99.{number}.2"
        assert host.namespace.startswith(PREFIX)
        assert len(host.namespace) <= 15, "the longest name of a network interface"
