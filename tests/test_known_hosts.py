"""known_hosts: what is known, unknown, changed and revoked, in every form in which OpenSSH writes it."""

import subprocess
from pathlib import Path

import paramiko
import pytest

from dflash_model.errors import HostError
from tasks.remote.endpoint import Endpoint
from tasks.remote.known_hosts import KnownHosts, Verdict, add_known_host, known_hosts_line, refusal


def new_key() -> paramiko.PKey:
    return paramiko.ECDSAKey.generate(bits=256)


KEY, OTHER = new_key(), new_key()
RSA = paramiko.RSAKey.generate(1024)


def endpoint(
    hostname: str = "gpu.example.org", port: int = 22, alias: str | None = None, files: tuple[Path, ...] = ()
) -> Endpoint:
    return Endpoint(name="gpu", hostname=hostname, port=port, user="u", key=None, known_hosts=files, host_key_alias=alias)


def line(names: str, key: paramiko.PKey = KEY, marker: str = "") -> str:
    return f"{marker}{names} {key.get_name()} {key.get_base64()} a comment\n"


def verdict(tmp_path: Path, text: str, where: Endpoint, key: paramiko.PKey = KEY) -> Verdict:
    path = tmp_path / "known"
    path.write_text(text)
    return KnownHosts.read((tmp_path / "missing", path), host="gpu").verdict(where, key)


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        ("", endpoint(), Verdict.UNKNOWN),
        (line("gpu.example.org"), endpoint(), Verdict.KNOWN),
        (line("a,gpu.example.org,10.0.0.1"), endpoint("10.0.0.1"), Verdict.KNOWN),
        (line("*.example.org"), endpoint(), Verdict.KNOWN),
        (line("*.example.org,!gpu.example.org"), endpoint(), Verdict.UNKNOWN),
        (line("gpu?example.org"), endpoint(), Verdict.KNOWN),
        (line("GPU.example.org"), endpoint(), Verdict.UNKNOWN),
        (line("gpu.example.org", OTHER), endpoint(), Verdict.CHANGED),
        (line("gpu.example.org", RSA), endpoint(), Verdict.CHANGED),
        (line("gpu.example.org", OTHER) + line("gpu.example.org"), endpoint(), Verdict.KNOWN),
        (line("other", OTHER), endpoint(), Verdict.UNKNOWN),
        (line("[gpu.example.org]:2222"), endpoint(port=2222), Verdict.KNOWN),
        (line("[gpu.example.org]:2222"), endpoint(), Verdict.UNKNOWN),
        (line("gpu.example.org"), endpoint(port=2222), Verdict.KNOWN),
        (line("gpu.example.org", OTHER), endpoint(port=2222), Verdict.UNKNOWN),
        (line("[gpu.example.org]:2222", OTHER), endpoint(port=2222), Verdict.CHANGED),
        (line("[*.example.org]:2222"), endpoint(port=2222), Verdict.KNOWN),
        (line("cluster"), endpoint(port=2222, alias="cluster"), Verdict.KNOWN),
        (line("cluster", OTHER), endpoint(alias="cluster"), Verdict.CHANGED),
        (line("gpu.example.org") + line("*", marker="@revoked "), endpoint(), Verdict.REVOKED),
        (line("gpu.example.org", marker="@cert-authority "), endpoint(), Verdict.UNKNOWN),
        ("# " + line("gpu.example.org"), endpoint(), Verdict.UNKNOWN),
        ("gpu.example.org ssh-ed25519 not-base64!\n" + line("gpu.example.org"), endpoint(), Verdict.KNOWN),
        ("gpu.example.org ssh-ed25519\n\n|1|broken|x ssh-ed25519 AAAA\n", endpoint(), Verdict.UNKNOWN),
    ],
)
def test_verdicts(tmp_path: Path, text: str, where: Endpoint, expected: Verdict) -> None:
    assert verdict(tmp_path, text, where) is expected


def test_names_hashed_by_paramiko_and_by_openssh_are_found(tmp_path: Path) -> None:
    hashed = paramiko.HostKeys.hash_host("gpu.example.org")
    assert verdict(tmp_path, line(hashed), endpoint()) is Verdict.KNOWN
    assert verdict(tmp_path, line(hashed), endpoint("gpu2.example.org")) is Verdict.UNKNOWN
    path = tmp_path / "openssh"
    path.write_text(line("[gpu.example.org]:2222"))
    try:
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(path)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no ssh-keygen on this machine")
    text = path.read_text()
    assert text.startswith("|1|")
    assert verdict(tmp_path, text, endpoint(port=2222)) is Verdict.KNOWN
    assert verdict(tmp_path, text, endpoint(port=2223)) is Verdict.UNKNOWN


def test_algorithms_of_known_keys_are_offered_first(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text(line("gpu.example.org", RSA))
    known = KnownHosts.read((path,), host="gpu")
    offered = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")
    assert known.preferred(endpoint(), offered) == ("rsa-sha2-512", "rsa-sha2-256", "ssh-ed25519", "ecdsa-sha2-nistp256")
    assert known.preferred(endpoint(port=2222), offered)[0] == "rsa-sha2-512"
    assert known.preferred(endpoint("unknown"), offered) == offered


def test_each_refusal_shows_fingerprint_line_and_command(tmp_path: Path) -> None:
    path = tmp_path / "known"
    path.write_text("# a comment\n" + line("[gpu.example.org]:2222", OTHER))
    where = endpoint(port=2222, files=(path,))
    known = KnownHosts.read((path,), host="gpu")
    expected_line = f"[gpu.example.org]:2222 ecdsa-sha2-nistp256 {KEY.get_base64()}"
    unknown = refusal(Verdict.UNKNOWN, where, KEY, known)
    assert type(unknown) is HostError
    assert unknown.problem.startswith("[gpu] the host key of [gpu.example.org]:2222 is not known")
    assert f"ecdsa-sha2-nistp256 {KEY.fingerprint}" in unknown.problem
    assert f"`dflash-eval hosts trust gpu`, or add this line to {path}: {expected_line}" in unknown.fix
    changed = refusal(Verdict.CHANGED, where, KEY, known)
    assert f"known is ecdsa-sha2-nistp256 {OTHER.fingerprint} in {path}:2" in changed.problem
    assert KEY.fingerprint in changed.problem
    assert expected_line in changed.fix
    assert "is revoked" in refusal(Verdict.REVOKED, where, KEY, known).problem


def test_a_line_that_is_added_makes_the_key_known_and_damages_nothing(tmp_path: Path) -> None:
    path = tmp_path / ".ssh" / "known_hosts"
    where = endpoint(port=2222)
    add_known_host(path, known_hosts_line(where, KEY))
    assert path.stat().st_mode & 0o777 == 0o600
    assert KnownHosts.read((path,), host="gpu").verdict(where, KEY) is Verdict.KNOWN
    path.write_text("last line without a newline")
    add_known_host(path, "second")
    add_known_host(path, "third")
    assert path.read_text() == "last line without a newline\nsecond\nthird\n"
