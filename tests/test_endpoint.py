"""Endpoints: explicit values win, ~/.ssh/config fills the gaps, jump hosts come in order."""

import getpass
from pathlib import Path

import pytest

from dflash_model.errors import InputError
from tasks.remote.endpoint import Endpoint, Timeouts, resolve_endpoint


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config"
    path.write_text(text)
    return path


FULL = """
Host gpu
    HostName 10.0.0.7
    Port 2200
    User me
    IdentityFile ~/.ssh/gpu_key
    IdentityFile /keys/second
    UserKnownHostsFile ~/known "/with space/known"
    HostKeyAlias cluster
Host *.example.org
    User other
"""


def test_without_a_configuration_the_defaults_of_ssh_hold(tmp_path: Path) -> None:
    found = resolve_endpoint("host-a", config_path=tmp_path / "none")
    home = Path.home() / ".ssh"
    assert (found.hostname, found.port, found.user) == ("host-a", 22, getpass.getuser())
    assert (found.key, found.use_agent, found.jumps, found.host_key_alias) == (None, True, (), None)
    assert found.identities == (home / "id_ed25519", home / "id_ecdsa", home / "id_rsa")
    assert found.known_hosts[:2] == (home / "known_hosts", home / "known_hosts2")
    assert Path("/etc/ssh/ssh_known_hosts") in found.known_hosts
    assert found.timeouts == Timeouts()


def test_an_alias_takes_everything_from_the_configuration(tmp_path: Path) -> None:
    found = resolve_endpoint("gpu", config_path=config(tmp_path, FULL))
    assert (found.hostname, found.port, found.user, found.host_key_alias) == ("10.0.0.7", 2200, "me", "cluster")
    assert found.identities == (Path.home() / ".ssh" / "gpu_key", Path("/keys/second"))
    assert found.known_hosts[:2] == (Path.home() / "known", Path("/with space/known"))
    assert found.known_as == "cluster"


def test_explicit_values_win(tmp_path: Path) -> None:
    found = resolve_endpoint(
        "night",
        hostname="gpu",
        port=22,
        user="you",
        key=Path("/k"),
        known_hosts=(Path("/h"),),
        config_path=config(tmp_path, FULL),
    )
    assert (found.name, found.hostname) == ("night", "10.0.0.7"), "`hostname` may be an alias, as for ssh"
    assert (found.port, found.user, found.key, found.known_hosts) == (22, "you", Path("/k"), (Path("/h"),))
    assert resolve_endpoint("x", hostname="n1.example.org", config_path=config(tmp_path, FULL)).user == "other"


@pytest.mark.parametrize(
    ("hostname", "port", "address", "known_as"),
    [
        ("h", 22, "u@h", "h"),
        ("h", 2222, "u@h:2222", "[h]:2222"),
        ("fe80::1", 22, "u@[fe80::1]", "fe80::1"),
        ("fe80::1", 2222, "u@[fe80::1]:2222", "[fe80::1]:2222"),
    ],
)
def test_how_an_endpoint_is_called(hostname: str, port: int, address: str, known_as: str) -> None:
    endpoint = Endpoint(name="n", hostname=hostname, port=port, user="u", key=None, known_hosts=())
    assert (endpoint.address, endpoint.known_as) == (address, known_as)


JUMPS = """
Host target
    ProxyJump you@gate1:2201,gate2
Host gate1
    HostName 10.0.0.1
    Port 9
    ProxyJump outer
    IdentityFile /keys/gate
Host gate2
    HostName 10.0.0.2
    User two
    ProxyJump never
Host outer
    HostName 10.0.0.9
"""


def test_a_chain_keeps_its_order_and_only_its_first_host_brings_jump_hosts_of_its_own(tmp_path: Path) -> None:
    found = resolve_endpoint(
        "t", hostname="target", user="me", key=Path("/k"), known_hosts=(Path("/h"),), config_path=config(tmp_path, JUMPS)
    )
    assert [hop.hostname for hop in found.jumps] == ["10.0.0.9", "10.0.0.1", "10.0.0.2"]
    assert [hop.port for hop in found.jumps] == [22, 2201, 22]
    assert [hop.user for hop in found.jumps] == [getpass.getuser(), "you", "two"]
    assert [hop.key for hop in found.jumps] == [Path("/k"), None, Path("/k")], "gate1 has an identity of its own"
    assert found.jumps[1].identities == (Path("/keys/gate"),)
    assert all(hop.jumps == () and hop.name == "t" and hop.known_hosts == (Path("/h"),) for hop in found.jumps)


@pytest.mark.parametrize(
    ("jump", "hops"),
    [
        ("none", []),
        ("a", [("a", 22)]),
        ("u@a:1,[::1]:2, ssh://b:3", [("a", 1), ("::1", 2), ("b", 3)]),
    ],
)
def test_an_explicit_jump_replaces_the_configured_one(tmp_path: Path, jump: str, hops: list[tuple[str, int]]) -> None:
    found = resolve_endpoint("target", jump=jump, config_path=config(tmp_path, JUMPS))
    assert [(hop.hostname, hop.port) for hop in found.jumps] == hops


def test_identities_only_leaves_the_agent_alone(tmp_path: Path) -> None:
    found = resolve_endpoint("a", config_path=config(tmp_path, "Host a\n IdentitiesOnly yes\n IdentityFile none\n"))
    assert (found.use_agent, found.identities) == (False, ())


@pytest.mark.parametrize(
    ("text", "jump", "sentence"),
    [
        ("Host a\n ProxyCommand nc %h %p\n", None, r"^\[a\] a in .*config is reached by a ProxyCommand, which is not supported"),
        ("Host a\n Port ssh\n", None, "the port 'ssh' is none"),
        ("Host a\n ProxyJump a\n", None, "more than 8 jump hosts"),
        ("Host a\n ProxyJump b\nHost b\n ProxyJump a\n", None, "more than 8 jump hosts"),
        ("", "a,,b", "the jump host '' cannot be read"),
        ("", "u@h:port", "the jump host 'u@h:port' cannot be read"),
        ("", "h:99999", "the port '99999' is none"),
        ("", ",".join("abcdefghi"), "more than 8 jump hosts"),
    ],
)
def test_each_mistake_gets_its_sentence(tmp_path: Path, text: str, jump: str | None, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        resolve_endpoint("a", jump=jump, config_path=config(tmp_path, text))
    assert caught.value.fix


def test_a_proxy_command_is_no_obstacle_where_a_jump_is_given_or_it_is_none(tmp_path: Path) -> None:
    path = config(tmp_path, "Host a\n ProxyCommand nc %h %p\nHost b\n ProxyCommand none\n")
    assert [hop.hostname for hop in resolve_endpoint("a", jump="gate", config_path=path).jumps] == ["gate"]
    assert resolve_endpoint("b", config_path=path).jumps == ()
