"""The selective relay between hosts of this machine: the same file as a local extraction, checked, resumed, or not at all."""

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from dflash_model.checkpoint.extract import Cast, extract_weights, extract_weights_from_dir
from dflash_model.checkpoint.extracted import EXTRACTED_NAME, WEIGHTS_NAME, Extracted
from dflash_model.checkpoint.source import ByteSource, LocalFile
from dflash_model.errors import Cancelled, CheckpointError, HostError, HostFull, SourceChanged, StorageError
from tasks.remote import origin, part, range_transfer, transfer
from tasks.remote.drafters import DCP, DIRECTORY, RemoteDrafter, discover
from tasks.remote.incoming import drop_incoming, has_arrived, incoming_path
from tasks.remote.journal import relay_id
from tasks.remote.local import LocalHost
from tasks.remote.selection import Selection
from tasks.remote.selective import plan_size, relay
from tests.checkpoint_files import LEGACY, drafter_tensors, many_tensors, ordered, save

OLD_NS = 10**18
INDEX_READS = 45
"""Of the checkpoints here: end record, directory, pickle and the local header of each tensor come before the first tensor."""
ODD = 'it\'s a "drafter" $HOME\n-rf ünï'


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks, memory and connections at the size of these files; no pauses."""
    monkeypatch.setattr(range_transfer, "MARK_BYTES", 1)
    monkeypatch.setattr(range_transfer, "SMALLEST_BYTES", 1)
    for module in (origin, part):
        monkeypatch.setattr(module, "FIRST_PAUSE_S" if module is origin else "PAUSE_S", 0.0)


class Train(LocalHost):
    """A training host that can be disturbed; counts what is read of its files."""

    def __init__(self, path: Path) -> None:
        super().__init__("train", path, threads=1, slots=1)
        self.grace_s = 5.0
        self.reads: list[tuple[int, int]] = []
        self.before_read: Callable[[int], None] = lambda _count: None

    @contextmanager
    def _watched(self, inner: AbstractContextManager[ByteSource]) -> Iterator[ByteSource]:
        with inner as source:
            plain = source.read_at

            def read_at(offset: int, size: int) -> bytes:
                self.reads.append((offset, size))
                self.before_read(len(self.reads))
                return plain(offset, size)

            source.read_at = read_at  # type: ignore[method-assign]
            yield source

    def open_source(self, path: PurePosixPath) -> AbstractContextManager[ByteSource]:
        return self._watched(super().open_source(path))


class Eval(LocalHost):
    """A destination whose writes can break."""

    def __init__(self, path: Path) -> None:
        super().__init__("eval", path, threads=1, slots=1)
        self.grace_s = 5.0
        self.written: list[int] = []
        self.break_after: list[int] = []
        self.flip: PurePosixPath | None = None
        self.room: int | None = None

    def write_blocks(self, path: PurePosixPath, blocks: Iterable[bytes], *, offset: int = 0, keep: bool = False) -> None:
        limit = self.break_after.pop(0) if self.break_after and ".part" in path.name else None
        self.written.append(offset)

        def limited() -> Iterator[bytes]:
            sent = 0
            for block in blocks:
                if limit is not None and sent + len(block) > limit:
                    yield block[: limit - sent]
                    raise HostError("[eval] the link is cut.")
                sent += len(block)
                yield block

        super().write_blocks(path, limited(), offset=offset, keep=keep)

    def free_bytes(self) -> int:
        return super().free_bytes() if self.room is None else self.room


@pytest.fixture
def train(tmp_path: Path) -> Train:
    return Train(tmp_path / "train")


@pytest.fixture
def evaluator(tmp_path: Path) -> Eval:
    return Eval(tmp_path / "eval")


Run = Callable[..., Extracted | None]


@pytest.fixture
def run(train: Train, evaluator: Eval, tmp_path: Path) -> Run:
    def go(drafter: RemoteDrafter, selection: Selection | None = None, **options: Any) -> Extracted | None:
        given = {"journals": tmp_path / "relay", "on_bytes": lambda _done, _total: None} | options
        return relay(drafter, selection or Selection(), train, evaluator, **given)

    return go


def training_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Weights, tables of the target, and an optimizer twice as large."""
    moments = {i: {"exp_avg": torch.ones(t.shape), "exp_avg_sq": torch.zeros(t.shape)} for i, t in enumerate(tensors.values())}
    tables = {"embed_tokens.weight": torch.ones(100, 8), "lm_head.weight": torch.ones(100, 8)}
    return {
        "model_state_dict": ordered(tensors | tables, "module._orig_mod."),
        "optimizer_state_dict": {"state": moments}, "step": 7, "args": argparse.Namespace(mask_token_id=3),
    }  # fmt: skip


def put(train: Train, value: Any, name: str = "c.pt", **options: Any) -> RemoteDrafter:
    path = Path(train.work_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    save(value, path, **options)
    os.utime(path, ns=(OLD_NS, OLD_NS))
    return find(train, name)


def find(train: Train, name: str) -> RemoteDrafter:
    found = discover(train, f"{'?' * len(name)}" if name == ODD else name, settle_s=0.0)
    train.reads.clear()
    return found


def weights(drafter: RemoteDrafter, evaluator: Eval, selection: Selection | None = None) -> Path:
    return Path(incoming_path(drafter, selection or Selection(), evaluator)) / WEIGHTS_NAME


def left(evaluator: Eval) -> list[str]:
    return sorted(path.name for path in Path(evaluator.work_dir).rglob("*") if path.is_file())


def quiet_dcp(value: Any, path: Path) -> None:
    dcp.save(value, checkpoint_id=path, no_dist=True)


@pytest.mark.parametrize("cast", ["keep", "bf16"])
@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_every_dtype_and_layout_arrives_as_a_local_extraction_writes_it(
    train: Train, evaluator: Eval, run: Run, tmp_path: Path, options: dict[str, Any], cast: Cast
) -> None:
    tensors = many_tensors() | drafter_tensors()
    drafter = put(train, training_state(tensors), ODD, **options)
    selection = Selection(cast=cast)
    moved = run(drafter, selection)
    assert moved is not None
    with LocalFile(Path(train.work_dir) / ODD) as source:
        local = extract_weights(source, tmp_path / "local", cast=cast)
    arrived = weights(drafter, evaluator, selection)
    assert arrived.read_bytes() == (tmp_path / "local").read_bytes()
    assert (moved.report.sha256, moved.report.dropped, moved.report.facts) == (local.sha256, local.dropped, local.facts)
    loaded = load_file(arrived)
    rounded = {torch.float32, torch.float16, torch.float64} if cast == "bf16" else set()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.bfloat16() if tensor.dtype in rounded else tensor), name
    assert left(evaluator) == [EXTRACTED_NAME, WEIGHTS_NAME]
    assert moved.transfer["checked"] == ("crc32" if not options else "sha256")
    assert (
        json.loads((arrived.parent / EXTRACTED_NAME).read_text())["report"]["sha256"]
        == hashlib.sha256(arrived.read_bytes()).hexdigest()
    )
    assert not list((tmp_path / "relay").glob("*.json")), "no notes of a finished transfer"


def test_optimizer_and_tables_stay_behind_unless_asked_for(train: Train, evaluator: Eval, run: Run) -> None:
    drafter = put(train, training_state(drafter_tensors(layers=2, hidden=128)))
    moved = run(drafter)
    assert moved is not None
    kept = moved.report.bytes_written
    assert moved.transfer["bytes_read"] < 1.01 * kept + 200_000
    assert sum(size for _, size in train.reads) == moved.transfer["bytes_read"]
    assert moved.transfer["bytes_saved"] == drafter.size_bytes - moved.transfer["bytes_read"] > kept
    assert plan_size(drafter, Selection(), train) == kept
    run(drafter, Selection(keep_vocab=True))
    assert set(load_file(weights(drafter, evaluator, Selection(keep_vocab=True)))) - set(
        load_file(weights(drafter, evaluator))
    ) == {
        "embed_tokens.weight",
        "lm_head.weight",
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["single", "sharded", "dcp"])
def test_directories_arrive_too(train: Train, evaluator: Eval, run: Run, tmp_path: Path, form: str) -> None:
    tensors = drafter_tensors(layers=2) | {"odd.bf16": torch.ones(3).bfloat16()}
    with_tables = tensors | {"embed_tokens.weight": torch.ones(1000, 8)}
    path = Path(train.work_dir) / "d"
    path.mkdir(parents=True)
    if form == "dcp":
        quiet_dcp({"model": ordered(with_tables, "model."), "step": 4}, path)
    else:
        names = sorted(with_tables)
        halves = [names] if form == "single" else [names[::2], names[1::2]]
        files = ["model.safetensors"] if form == "single" else ["m-1.safetensors", "m-2.safetensors"]
        for file, some in zip(files, halves, strict=True):
            save_file({name: with_tables[name] for name in some}, path / file)
        if form == "sharded":
            index = {name: file for file, some in zip(files, halves, strict=True) for name in some}
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        (path / "config.json").write_text('{"block_size": 8}')
    drafter = find(train, "d")
    assert drafter.form == (DCP if form == "dcp" else DIRECTORY)
    moved = run(drafter)
    assert moved is not None
    local = extract_weights_from_dir(path, tmp_path / "local")
    assert weights(drafter, evaluator).read_bytes() == (tmp_path / "local").read_bytes()
    assert moved.report.dropped == local.dropped != {}
    assert moved.transfer["checked"] == "sha256"
    beside = [] if form == "dcp" else ["config.json"]
    assert left(evaluator) == sorted([EXTRACTED_NAME, WEIGHTS_NAME, *beside])


def test_what_has_arrived_is_not_moved_again_and_dropping_leaves_the_source(train: Train, evaluator: Eval, run: Run) -> None:
    drafter = put(train, training_state(drafter_tensors()))
    assert not has_arrived(drafter, Selection(), evaluator)
    first = run(drafter)
    train.reads.clear()
    assert run(drafter) == first
    assert train.reads == []
    assert has_arrived(drafter, Selection(), evaluator)
    assert not has_arrived(drafter, Selection(cast="bf16"), evaluator)
    weights(drafter, evaluator).write_bytes(b"cut short")
    assert not has_arrived(drafter, Selection(), evaluator)
    drop_incoming(drafter, Selection(), evaluator)
    assert left(evaluator) == []
    drop_incoming(drafter, Selection(), train)
    assert Path(drafter.path).exists()
    assert relay(drafter, Selection(), train, train, journals=Path("/nonexistent"), on_bytes=lambda *_: None) is None


# Breaks


@pytest.mark.parametrize("breaks", [[0], [100_000], [30_000, 5, 0, 70_001]])
def test_a_broken_write_goes_on_where_it_was_and_reads_nothing_twice(
    train: Train, evaluator: Eval, run: Run, breaks: list[int]
) -> None:
    drafter = put(train, training_state(drafter_tensors(layers=3, hidden=64)))
    whole = run(drafter)
    reads = list(train.reads)
    assert whole is not None
    drop_incoming(drafter, Selection(), evaluator)
    train.reads.clear()
    evaluator.written.clear()
    evaluator.break_after = list(breaks)
    again = run(drafter)
    assert again is not None
    assert again.report == whole.report
    assert train.reads == reads
    assert evaluator.written[: len(breaks) + 1] == [sum(breaks[:n]) for n in range(len(breaks) + 1)]


def test_more_lost_than_is_remembered_starts_at_an_earlier_tensor(
    train: Train, evaluator: Eval, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "RECENT_BYTES", 1000)
    drafter = put(train, training_state(drafter_tensors(layers=3, hidden=64)))
    plain = evaluator.write_blocks
    state = {"cut": False}

    def losing(path: PurePosixPath, blocks: Iterable[bytes], *, offset: int = 0, keep: bool = False) -> None:
        try:
            plain(path, blocks, offset=offset, keep=keep)
        except HostError:
            os.truncate(path, 60_000)  # a power cut took what was not on the disk yet
            state["cut"] = True
            raise

    evaluator.write_blocks = losing  # type: ignore[method-assign]
    evaluator.break_after = [120_000]
    moved = run(drafter)
    assert moved is not None
    assert state["cut"]
    resumed = evaluator.written[1]
    assert 50_000 < resumed <= 60_000, "behind the last tensor that was there as a whole"
    assert torch.equal(load_file(weights(drafter, evaluator))["norm.weight"], load_ours(drafter)["norm.weight"])


def load_ours(drafter: RemoteDrafter) -> dict[str, torch.Tensor]:
    state = torch.load(drafter.path, weights_only=False)["model_state_dict"]
    return {name.removeprefix("module._orig_mod."): tensor for name, tensor in state.items()}


def test_a_broken_read_is_tried_again_and_goes_on(train: Train, evaluator: Eval, run: Run) -> None:
    drafter = put(train, training_state(drafter_tensors(layers=2, hidden=64)))
    whole = run(drafter)
    assert whole is not None
    drop_incoming(drafter, Selection(), evaluator)

    def cut(count: int) -> None:
        if count in (4, 9, 10, 11):
            raise HostError("[train] the link is cut.")

    train.reads.clear()
    train.before_read = cut
    again = run(drafter)
    assert again is not None
    assert again.report.sha256 == whole.report.sha256
    assert again.transfer["bytes_read"] == whole.transfer["bytes_read"]


def test_a_host_that_stays_away_is_given_up_and_what_arrived_is_kept_for_the_next_run(
    train: Train, evaluator: Eval, run: Run, tmp_path: Path
) -> None:
    """As after kill -9 of the relay: a new process has only the notes and the part."""
    drafter = put(train, training_state(drafter_tensors(layers=3, hidden=64)))
    whole = run(drafter)
    assert whole is not None
    full_reads = sum(size for _, size in train.reads)
    drop_incoming(drafter, Selection(), evaluator)
    train.grace_s = 0.0
    train.reads.clear()

    def cut(count: int) -> None:
        if count > INDEX_READS + 20:
            raise HostError("[train] the link is cut.")

    train.before_read = cut
    with pytest.raises(HostError, match="the link is cut"):
        run(drafter)
    name = f"{WEIGHTS_NAME}.{relay_id(tmp_path / 'relay')}.part"
    assert left(evaluator) == [name]
    train.before_read = lambda _count: None
    train.reads.clear()
    seen: list[int] = []
    again = run(drafter, on_bytes=lambda done, _total: seen.append(done))
    assert again is not None
    assert again.report.sha256 == whole.report.sha256
    assert again.transfer["bytes_resumed"] > 0.2 * whole.report.bytes_written
    assert seen[0] == again.transfer["bytes_resumed"]
    assert again.transfer["bytes_written"] + again.transfer["bytes_resumed"] == whole.report.bytes_written
    assert sum(size for _, size in train.reads) < full_reads - again.transfer["bytes_resumed"] + 5000
    assert left(evaluator) == [EXTRACTED_NAME, WEIGHTS_NAME]


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "notes"])
def test_a_part_that_is_not_what_the_notes_say_is_not_believed(
    train: Train, evaluator: Eval, run: Run, tmp_path: Path, damage: str
) -> None:
    drafter = put(train, training_state(drafter_tensors(layers=3, hidden=64)))
    train.grace_s = 0.0

    def cut(count: int) -> None:
        if count > INDEX_READS + 20:
            raise HostError("[train] the link is cut.")

    train.before_read = cut
    with pytest.raises(HostError):
        run(drafter)
    (found,) = Path(evaluator.work_dir).rglob("*.part")
    if damage == "flip":
        content = bytearray(found.read_bytes())
        content[10_000] ^= 1
        found.write_bytes(content)
    elif damage == "cut":
        os.truncate(found, 1000)
    elif damage == "gone":
        found.unlink()
    else:
        (notes,) = (tmp_path / "relay").glob("*.json")
        notes.write_text("{")
    train.before_read = lambda _count: None
    again = run(drafter)
    assert again is not None
    assert again.transfer["bytes_resumed"] == 0
    assert torch.equal(load_file(weights(drafter, evaluator))["fc.weight"], load_ours(drafter)["fc.weight"])


def test_a_flipped_byte_in_the_part_is_caught_and_nothing_stays(
    train: Train, evaluator: Eval, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = put(train, training_state(drafter_tensors()))

    def flipped(path: PurePosixPath) -> str:
        content = bytearray(Path(path).read_bytes())
        content[len(content) // 2] ^= 1
        Path(path).write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "sha256", flipped)
        with pytest.raises(StorageError, match=r"from train arrived on eval damaged: bytes 0 to \d+ have sha256"):
            run(drafter)
    assert left(evaluator) == []
    assert not list((tmp_path / "relay").glob("*.json"))
    assert run(drafter) is not None


def test_too_little_room_is_said_before_the_first_byte(train: Train, evaluator: Eval, run: Run) -> None:
    drafter = put(train, training_state(drafter_tensors()))
    evaluator.room = transfer.SPARE_BYTES + 5
    with pytest.raises(HostFull, match=r"\[eval\] 64 MiB are free"):
        run(drafter)
    assert left(evaluator) == []


def test_the_end_of_the_run_ends_the_transfer(train: Train, evaluator: Eval, run: Run) -> None:
    from tasks.remote.processes import end_everything

    drafter = put(train, training_state(drafter_tensors(layers=2)))
    train.before_read = lambda count: end_everything() if count == 8 else None
    with pytest.raises(Cancelled, match=r"\[train\] moving .* was ended on request"):
        run(drafter)
    assert not has_arrived(drafter, Selection(), evaluator)


# A source that does not hold still


def overwrite(path: Path, value: Any) -> None:
    """In place: the same inode."""
    other = path.with_name("other")
    save(value, other)
    path.write_bytes(other.read_bytes())
    other.unlink()


@pytest.mark.parametrize("how", ["in place", "in place, same times", "replaced", "removed", "cut"])
@pytest.mark.parametrize("when", [1, 9])
def test_a_source_that_changes_is_caught(train: Train, evaluator: Eval, run: Run, how: str, when: int) -> None:
    drafter = put(train, training_state(drafter_tensors(layers=2, hidden=64)))
    path = Path(drafter.path)
    other = training_state({name: tensor + 1 for name, tensor in drafter_tensors(layers=2, hidden=64).items()})

    def change(count: int) -> None:
        if count != when:
            return
        before = path.stat()
        if how.startswith("in place"):
            overwrite(path, other)
            if "times" in how:
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        elif how == "replaced":
            save(other, path.with_name("new"))
            path.with_name("new").rename(path)
        elif how == "removed":
            path.unlink()
        else:
            os.truncate(path, 5000)

    train.before_read = change
    with pytest.raises(
        CheckpointError, match=r"train.*(changed|written to|replaced|removed|cut short|CRC32|is not the checkpoint)"
    ):
        run(drafter)
    assert left(evaluator) == []


def test_a_source_that_was_only_touched_is_moved_after_a_fresh_start(train: Train, evaluator: Eval, run: Run) -> None:
    drafter = put(train, training_state(drafter_tensors(layers=2)))
    train.before_read = lambda count: os.utime(drafter.path) if count == 9 else None
    assert run(drafter) is not None
    assert torch.equal(load_file(weights(drafter, evaluator))["fc.weight"], load_ours(drafter)["fc.weight"])


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_a_file_overwritten_between_discovery_and_relay_is_caught(train: Train, run: Run, options: dict[str, Any]) -> None:
    tensors = drafter_tensors()
    drafter = put(train, training_state(tensors), **options)
    save(training_state({name: tensor * 2 for name, tensor in tensors.items()}), Path(drafter.path), **options)
    with pytest.raises(SourceChanged, match=r"c\.pt changed since it was found"):
        run(drafter)


def test_bytes_that_come_otherwise_than_they_lie_there_are_caught_without_checksums(
    train: Train, evaluator: Eval, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A legacy file has no CRC32: only hashing at the source tells a byte that was flipped on the way."""
    drafter = put(train, training_state(drafter_tensors()), **LEGACY)
    plain = LocalFile.read_at

    def flipping(self: LocalFile, offset: int, size: int) -> bytes:
        data = plain(self, offset, size)
        return data[:-1] + bytes([data[-1] ^ 1]) if size == 256 else data

    monkeypatch.setattr(LocalFile, "read_at", flipping)
    with pytest.raises(SourceChanged, match="has other bytes from"):
        run(drafter)
    monkeypatch.setattr(train, "range_sha256", lambda *_: None)
    moved = run(drafter)
    assert moved is not None
    assert moved.transfer["checked"] == "unchecked", "and a host that cannot hash is said in the manifest"


# Several connections


@pytest.mark.parametrize("count", [2, 5])
def test_several_connections_give_the_same_file(train: Train, evaluator: Eval, run: Run, count: int) -> None:
    drafter = put(train, training_state(drafter_tensors(layers=3, hidden=64)))
    whole = run(drafter)
    assert whole is not None
    drop_incoming(drafter, Selection(), evaluator)
    train.connections = count
    evaluator.break_after = [10_000, 20_000]
    again = run(drafter)
    assert again is not None
    assert again.report.sha256 == whole.report.sha256 == hashlib.sha256(weights(drafter, evaluator).read_bytes()).hexdigest()
    assert 1 < again.transfer["connections"] <= count
    assert left(evaluator) == [EXTRACTED_NAME, WEIGHTS_NAME]


def test_of_several_connections_one_that_fails_ends_all_and_the_next_run_resumes(train: Train, evaluator: Eval, run: Run) -> None:
    drafter = put(train, training_state(drafter_tensors(layers=3, hidden=64)))
    train.connections, train.grace_s = 2, 0.0

    def cut(count: int) -> None:
        if count == 2 * INDEX_READS + 30:
            raise HostError("[train] the link is cut.")

    train.before_read = cut
    with pytest.raises(HostError, match="the link is cut"):
        run(drafter)
    train.before_read = lambda _count: None
    again = run(drafter)
    assert again is not None
    assert again.transfer["bytes_resumed"] > 0
    assert torch.equal(load_file(weights(drafter, evaluator))["fc.weight"], load_ours(drafter)["fc.weight"])


def test_abandoned_parts_are_swept_and_fresh_ones_are_not(train: Train, evaluator: Eval, run: Run) -> None:
    drafter = put(train, training_state(drafter_tensors()))
    places = {}
    for name, age_s in (("old", 25 * 3600), ("fresh", 60)):
        places[name] = Path(evaluator.work_dir) / "incoming" / name / f"{WEIGHTS_NAME}.ab.part"
        places[name].parent.mkdir(parents=True)
        places[name].write_bytes(b"x")
        at = places[name].stat().st_mtime - age_s
        os.utime(places[name], (at, at))
    run(drafter)
    assert not places["old"].parent.exists()
    assert places["fresh"].exists()
