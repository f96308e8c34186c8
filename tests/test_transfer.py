"""Moving files and artifacts between hosts: whole, checked, or not at all."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

from dflash_model.errors import CheckpointError, HostError, HostFull, StorageError
from dflash_model.storage import artifacts_dir, find_artifact, writing_artifact
from tasks.remote import transfer
from tasks.remote.local import LocalHost
from tasks.remote.transfer import SPARE_BYTES, copy_artifact, copy_file


def host(tmp_path: Path, name: str) -> LocalHost:
    (tmp_path / name).mkdir(exist_ok=True)
    return LocalHost(name, tmp_path / name, threads=1, slots=1)


def quiet(_done: int, _total: int) -> None:
    return


def everything(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


class FlippingHost(LocalHost):
    """A host whose disk flips one bit of what is written."""

    def write_blocks(self, path: PurePosixPath, blocks: Iterable[bytes], *, offset: int = 0, keep: bool = False) -> None:
        super().write_blocks(path, (bytes([block[0] ^ 1]) + block[1:] for block in blocks), offset=offset, keep=keep)


class TinyHost(LocalHost):
    """A host with hardly any room."""

    def free_bytes(self) -> int:
        return SPARE_BYTES + 3


class GrowingHost(LocalHost):
    """A host whose file grows while it is read."""

    def read_blocks(self, path: PurePosixPath, *, offset: int = 0) -> Iterator[bytes]:
        yield from super().read_blocks(path, offset=offset)
        yield b"more"


class CutHost(LocalHost):
    """A host whose link breaks after so many blocks, as often as told; `meanwhile` happens while it is down."""

    breaks = 0
    meanwhile: Callable[[], None] = staticmethod(lambda: None)
    offsets: list[int]

    def read_blocks(self, path: PurePosixPath, *, offset: int = 0) -> Iterator[bytes]:
        self.offsets = [*getattr(self, "offsets", []), offset]
        for number, block in enumerate(super().read_blocks(path, offset=offset)):
            if number == 2 and self.breaks:
                self.breaks -= 1
                self.meanwhile()
                raise HostError(f"[{self.name}] the link is cut.")
            yield block


def put(where: LocalHost, name: str, content: bytes) -> PurePosixPath:
    path = Path(where.work_dir) / name
    path.write_bytes(content)
    return PurePosixPath(path)


def test_a_file_arrives_whole_with_its_digest_and_progress(tmp_path: Path) -> None:
    a, b = host(tmp_path, "a"), host(tmp_path, "b")
    content = bytes(range(256)) * 20_000
    seen: list[int] = []
    digest = copy_file(
        a,
        put(a, "f", content),
        b,
        b.work_dir / "deep" / "f",
        size_bytes=len(content),
        sha256=None,
        on_bytes=lambda done, _total: seen.append(done),
    )
    assert digest == hashlib.sha256(content).hexdigest()
    assert Path(b.work_dir / "deep" / "f").read_bytes() == content
    assert seen == sorted(seen)
    assert seen[-1] == len(content)
    assert everything(tmp_path / "b") == ["deep/f"]


def test_a_flipped_bit_is_caught_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    a, b = host(tmp_path, "a"), FlippingHost("b", tmp_path / "b", threads=1, slots=1)
    with pytest.raises(StorageError, match="arrived on b with sha256"):
        copy_file(a, put(a, "f", b"content"), b, b.work_dir / "f", size_bytes=7, sha256=None, on_bytes=quiet)
    assert everything(tmp_path / "b") == []


def test_another_digest_than_announced_is_caught(tmp_path: Path) -> None:
    a, b = host(tmp_path, "a"), host(tmp_path, "b")
    with pytest.raises(StorageError, match="arrived on b with sha256"):
        copy_file(a, put(a, "f", b"content"), b, b.work_dir / "f", size_bytes=7, sha256="0" * 64, on_bytes=quiet)
    assert everything(tmp_path / "b") == []


def test_a_source_that_changes_size_is_caught(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    a, b = GrowingHost("a", tmp_path / "a", threads=1, slots=1), host(tmp_path, "b")
    with pytest.raises(CheckpointError, match="changed while it was read"):
        copy_file(a, put(a, "f", b"content"), b, b.work_dir / "f", size_bytes=7, sha256=None, on_bytes=quiet)
    assert everything(tmp_path / "b") == []


def test_too_little_room_is_said_before_the_first_byte(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    a, b = host(tmp_path, "a"), TinyHost("b", tmp_path / "b", threads=1, slots=1)
    with pytest.raises(HostFull, match=r"\[b\] 64 MiB are free"):
        copy_file(a, put(a, "f", b"content"), b, b.work_dir / "f", size_bytes=7, sha256=None, on_bytes=quiet)
    assert everything(tmp_path / "b") == []


BLOCKS = b"".join(bytes([number]) * (1 << 20) for number in range(7)) + b"end"


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CutHost:
    monkeypatch.setattr(transfer, "COPY_PAUSE_S", 0.0)
    (tmp_path / "a").mkdir()
    return CutHost("a", tmp_path / "a", threads=1, slots=1)


def test_a_cut_link_is_waited_for_and_the_copy_goes_on_where_it_was(tmp_path: Path, cut: CutHost) -> None:
    b = host(tmp_path, "b")
    cut.breaks = 3
    digest = copy_file(cut, put(cut, "f", BLOCKS), b, b.work_dir / "f", size_bytes=len(BLOCKS), sha256=None, on_bytes=quiet)
    assert digest == hashlib.sha256(BLOCKS).hexdigest()
    assert Path(b.work_dir / "f").read_bytes() == BLOCKS
    assert cut.offsets == [0, 2 << 20, 4 << 20, 6 << 20]
    assert everything(tmp_path / "b") == ["f"]


def test_a_source_that_changed_while_the_link_was_down_is_caught(tmp_path: Path, cut: CutHost) -> None:
    b = host(tmp_path, "b")
    path = put(cut, "f", BLOCKS)
    cut.breaks, cut.meanwhile = 1, lambda: put(cut, "f", BLOCKS[::-1]) and None
    with pytest.raises(CheckpointError, match="changed while the link was down"):
        copy_file(cut, path, b, b.work_dir / "f", size_bytes=len(BLOCKS), sha256=None, on_bytes=quiet)
    assert everything(tmp_path / "b") == []


def test_a_host_that_stays_away_is_given_up_and_nothing_stays(tmp_path: Path, cut: CutHost) -> None:
    b = host(tmp_path, "b")
    cut.breaks = 99
    long = BLOCKS * 3
    with pytest.raises(HostError, match="link is cut"):
        copy_file(cut, put(cut, "f", long), b, b.work_dir / "f", size_bytes=len(long), sha256=None, on_bytes=quiet)
    assert everything(tmp_path / "b") == []


def make(where: LocalHost, key: str, content: bytes, parts: dict[str, str] | None = None) -> str:
    with writing_artifact(Path(where.work_dir), kind="thing", key=key) as writer:
        (writer.path / "sub").mkdir()
        (writer.path / "sub" / "f").write_bytes(content)
        writer.parts |= parts or {}
    manifest = where.find_artifact(key)
    assert manifest is not None
    return manifest.digest


def test_an_artifact_moves_with_its_parts_and_keeps_its_digest(tmp_path: Path) -> None:
    a, b = host(tmp_path, "a"), host(tmp_path, "b")
    part = make(a, "part", b"1234")
    make(a, "whole", b"123456", {"part": part})
    manifest = a.find_artifact("whole")
    assert manifest is not None
    assert copy_artifact(manifest, a, b, on_bytes=quiet) == 10
    assert b.find_artifact("whole") == manifest
    assert copy_artifact(manifest, a, b, on_bytes=quiet) == 0


def test_only_the_missing_part_moves(tmp_path: Path) -> None:
    a, b = host(tmp_path, "a"), host(tmp_path, "b")
    make(a, "whole", b"123456", {"part": make(a, "part", b"1234")})
    make(b, "part", b"1234")
    manifest = a.find_artifact("whole")
    assert manifest is not None
    assert copy_artifact(manifest, a, b, on_bytes=quiet) == 6


def test_a_damaged_source_gives_no_artifact(tmp_path: Path) -> None:
    a, b = host(tmp_path, "a"), host(tmp_path, "b")
    make(a, "k", b"1234")
    manifest = a.find_artifact("k")
    assert manifest is not None
    (artifacts_dir(tmp_path / "a") / "k" / "sub" / "f").write_bytes(b"9999")
    with pytest.raises(StorageError, match="arrived on b with sha256"):
        copy_artifact(manifest, a, b, on_bytes=quiet)
    assert find_artifact(tmp_path / "b", "k") is None
    assert everything(tmp_path / "b") == []
