"""The site: find an artifact on any host, bring it, make it; the store decides, not a memory of it."""

from pathlib import Path
from typing import Any

import pytest

from dflash_model.errors import ArtifactLost, HostError, StageKilled
from dflash_model.storage import artifacts_dir
from tasks.remote.inventory import RELAY, read_inventory
from tasks.remote.site import Found, Site, Work


@pytest.fixture
def site(tmp_path: Path, fake_python: str) -> Site:
    lines = [f"  {name}: {{work_dir: {name}, roles: [eval], python: {fake_python}}}" for name in ("a", "b")]
    (tmp_path / "hosts.yaml").write_text("hosts:\n" + "\n".join(lines) + "\n")
    return Site(read_inventory(tmp_path / "hosts.yaml", home=tmp_path / "home"), home=tmp_path / "home")


def ensure(
    site: Site, do: str, host: str, *, tmp_path: Path, inputs: dict[str, tuple[str, str]] | None = None
) -> tuple[Found, list[Any]]:
    events: list[Any] = []
    work = Work(stage="replay", inputs=inputs or {}, parameters={"do": do})
    found = site.ensure(work, [host], log_path=tmp_path / "log", deadline_s=60, on_event=events.append)
    return found, [e for e in events if e["event"] == "milestone"]


def test_work_names_its_output_without_the_host(tmp_path: Path) -> None:
    one = Work(stage="replay", inputs={"x": ("key", "digest")}, parameters={"n": 1}, local={"path": "/here"})
    two = Work(stage="replay", inputs={"x": ("other-key", "digest")}, parameters={"n": 1}, local={"path": "/there"})
    assert one.key == two.key
    assert Work.from_json(one.to_json()) == one
    assert Work(stage="replay", inputs={"x": ("key", "other")}, parameters={"n": 1}).key != one.key


def test_work_is_done_once_and_kept_on_the_relay(site: Site, tmp_path: Path) -> None:
    found, ran = ensure(site, "work", "a", tmp_path=tmp_path)
    assert len(ran) == 1
    assert site.host(RELAY).find_artifact(found.manifest.key) is not None
    assert sorted(site.ledger.holders(found.manifest.key)) == ["a", RELAY]
    _, again = ensure(site, "work", "a", tmp_path=tmp_path)
    _, elsewhere = ensure(site, "work", "b", tmp_path=tmp_path)
    assert again == elsewhere == []


def test_an_artifact_whose_holders_lost_it_is_made_again(site: Site, tmp_path: Path) -> None:
    found, _ = ensure(site, "work", "a", tmp_path=tmp_path)
    for host in ("a", RELAY):
        (artifacts_dir(Path(site.host(host).work_dir)) / found.manifest.key / "out.txt").unlink()
    assert site.find(found.manifest.key) is None
    assert site.ledger.holders(found.manifest.key) == ()
    again, ran = ensure(site, "work", "b", tmp_path=tmp_path)
    assert len(ran) == 1
    assert again.manifest.digest == found.manifest.digest


def test_inputs_are_brought_to_the_host_that_needs_them(site: Site, tmp_path: Path) -> None:
    first, _ = ensure(site, "first", "a", tmp_path=tmp_path)
    key, digest = first.manifest.key, first.manifest.digest
    second, _ = ensure(site, "second", "b", tmp_path=tmp_path, inputs={"source": (key, digest)})
    copied = artifacts_dir(Path(site.host("b").work_dir)) / second.manifest.key / "source.txt"
    assert copied.read_text() == "first"
    assert "b" in site.ledger.holders(key)


def test_a_lost_ledger_costs_nothing_but_a_look(site: Site, tmp_path: Path) -> None:
    found, _ = ensure(site, "work", "a", tmp_path=tmp_path)
    for entry in (tmp_path / "home" / RELAY / "ledger").iterdir():
        entry.unlink()
    _, ran = ensure(site, "work", "b", tmp_path=tmp_path)
    assert ran == []
    assert site.find(found.manifest.key) is not None


def test_a_failed_stage_leaves_its_inputs_in_place_and_says_so(site: Site, tmp_path: Path) -> None:
    with pytest.raises(StageKilled):
        ensure(site, "kill", "a", tmp_path=tmp_path)
    assert site.find(Work(stage="replay", inputs={}, parameters={"do": "kill"}).key) is None


def test_bringing_what_nobody_has_is_a_sentence(site: Site) -> None:
    with pytest.raises(ArtifactLost, match="No reachable host holds nothing-v1"):
        site.bring("nothing-v1", "a")


def test_a_listing_changes_with_the_files(site: Site, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    before = site.listing("a", str(tmp_path / "m"))
    (tmp_path / "m" / "config.json").write_text("{} ")
    assert site.listing("a", str(tmp_path / "m")) != before
    assert [row[0] for row in before] == ["config.json"]


def test_a_host_that_cannot_run_is_passed_over_and_left_alone(tmp_path: Path, fake_python: str) -> None:
    (tmp_path / "hosts.yaml").write_text(
        "hosts:\n  a: {work_dir: a, roles: [eval], python: /none/python}\n"
        f"  b: {{work_dir: b, roles: [eval], python: {fake_python}}}\n"
    )
    site = Site(read_inventory(tmp_path / "hosts.yaml", home=tmp_path / "home"), home=tmp_path / "home")
    skipped: list[tuple[str, str]] = []

    def go(do: str, hosts: list[str]) -> Found:
        work = Work(stage="replay", inputs={}, parameters={"do": do})
        return site.ensure(
            work,
            hosts,
            log_path=tmp_path / "log",
            deadline_s=60,
            on_event=lambda _e: None,
            on_skip=lambda host, reason: skipped.append((host, reason)),
        )

    assert go("work", ["a", "b"]).host == "b"
    assert [host for host, _ in skipped] == ["a"]
    assert "could not start /none/python" in skipped[0][1]
    # Known to be of no use, it is not even tried the second time.
    assert site.avoided.reason("a") is not None
    assert go("other", ["a", "b"]).host == "b"
    with pytest.raises(HostError, match="could not start /none/python"):
        go("third", ["a"])
    # A stage's own error is not a matter of the host.
    with pytest.raises(StageKilled):
        go("kill", ["b", "a"])
    assert site.avoided.reason("b") is None


def test_a_discarded_artifact_is_gone_everywhere_with_its_parts(site: Site, tmp_path: Path) -> None:
    found, _ = ensure(site, "work", "a", tmp_path=tmp_path)
    site.discard(found.manifest.key)
    assert site.find(found.manifest.key) is None
    _, ran = ensure(site, "work", "a", tmp_path=tmp_path)
    assert len(ran) == 1
