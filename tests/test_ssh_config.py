"""SSH configurations with Include: what is included counts where it stands, and no further."""

from pathlib import Path

import pytest

from dflash_model.errors import InputError
from tasks.remote.ssh_config import read_ssh_config


def test_included_hosts_count_and_do_not_swallow_what_follows(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "b.conf").write_text("Host b\n  User from-b\n")
    (tmp_path / "conf.d" / "a.conf").write_text("Host a\n  User from-a\n")
    (tmp_path / "more conf").write_text("Port 77\n")
    (tmp_path / "config").write_text(
        'Include conf.d/*.conf none.conf\nUser everybody\nHost c\n  include "more conf"\n  HostName real-c\n'
    )
    config = read_ssh_config(tmp_path / "config")
    assert config.lookup("a")["user"] == "from-a"
    assert config.lookup("b")["user"] == "from-b"
    assert config.lookup("c")["user"] == "everybody", "the User after the Include belongs to every host, not to host b"
    assert (config.lookup("c")["port"], config.lookup("c")["hostname"]) == ("77", "real-c")
    assert "port" not in config.lookup("a")


def test_a_missing_file_is_an_empty_one(tmp_path: Path) -> None:
    assert dict(read_ssh_config(tmp_path / "none").lookup("a")) == {"hostname": "a"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Include config\n", "more than 16 levels deep"),
        ("what is this?\n= nothing\n", "cannot be read as an SSH configuration"),
        ('Include "open\n', "cannot be read as an SSH configuration"),
    ],
)
def test_each_mistake_gets_its_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_ssh_config(tmp_path / "config")
