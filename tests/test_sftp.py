"""SFTP against a server written here: answers out of order, short, late, and no answers at all."""

import random
import struct
from collections.abc import Callable
from pathlib import PurePosixPath

import pytest
from paramiko import sftp as protocol

from dflash_model.errors import EvalError, HostError, InputError, StorageError
from tasks.remote.sftp import IN_FLIGHT, REQUEST_BYTES, Sftp
from tasks.remote.sftp_packets import string

Answers = Callable[[int, int, bytes], list[bytes]]


def packet(kind: int, number: int, body: bytes) -> bytes:
    return struct.pack(">IBI", 5 + len(body), kind, number) + body


def status(number: int, code: int, message: bytes = b"said") -> bytes:
    return packet(protocol.CMD_STATUS, number, struct.pack(">I", code) + string(message) + string(b"en"))


class Server:
    """The other end of a stream; `answers` makes packets of a request (kind, number, body)."""

    def __init__(self, answers: Answers, *, seed: int = 0, greeting: bytes | None = None) -> None:
        self._answers = answers
        self._rng = random.Random(seed)
        self._greeting = greeting
        self._in = b""
        self._out: list[bytes] = []
        self.is_open = True
        self.waiting_most = 0

    def write(self, data: bytes) -> bool:
        self._in += data
        while len(self._in) >= 4 and len(self._in) >= 4 + int.from_bytes(self._in[:4]):
            size = int.from_bytes(self._in[:4])
            content, self._in = self._in[4 : 4 + size], self._in[4 + size :]
            if content[0] == protocol.CMD_INIT:
                version = struct.pack(">IBI", 5 + 8, protocol.CMD_VERSION, 3) + string(b"") + string(b"")
                self._out.append(version if self._greeting is None else self._greeting)
            else:
                self._out += self._answers(content[0], int.from_bytes(content[1:5]), content[5:])
        self.waiting_most = max(self.waiting_most, len(self._out))
        return True

    def read(self) -> bytes:
        """Some bytes of any one answer; whole packets in any order, cut anywhere."""
        if not self._out:
            self.is_open = False
            return b""
        at = self._rng.randrange(len(self._out)) if self._whole() else 0
        chosen = self._out.pop(at)
        cut = self._rng.randint(1, len(chosen))
        if cut < len(chosen):
            self._out.insert(0, chosen[cut:])
            self._started = True
        else:
            self._started = False
        return chosen[:cut]

    _started = False

    def _whole(self) -> bool:
        return not self._started


def file_server(content: bytes, *, most: int = 1 << 30, ends_at: int | None = None) -> Answers:
    """Answers READ from `content`, at most `most` bytes at a time, as if the file ended at `ends_at`."""
    end = len(content) if ends_at is None else ends_at

    def answers(kind: int, number: int, body: bytes) -> list[bytes]:
        assert kind == protocol.CMD_READ
        handle_size = int.from_bytes(body[:4])
        offset, size = struct.unpack_from(">QI", body, 4 + handle_size)
        if offset >= end:
            return [status(number, protocol.SFTP_EOF)]
        return [packet(protocol.CMD_DATA, number, string(content[offset : min(end, offset + min(size, most))]))]

    return answers


def session(server: Server) -> Sftp:
    return Sftp(server, host="gpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1 << 30, 64 << 10, 50_001])
def test_ranges_come_back_whole_and_in_order_whatever_order_and_size_the_answers_have(most: int) -> None:
    content = random.Random(1).randbytes(3_000_000)
    rng = random.Random(2)
    ranges = [(rng.randrange(2_000_000), rng.choice([0, 1, 30, REQUEST_BYTES, 900_000])) for _ in range(40)]
    server = Server(file_server(content, most=most), seed=most)
    sftp = session(server)
    answers = sftp.read(b"h", ranges, doing="reading /f")
    assert answers == [content[offset : offset + size] for offset, size in ranges]
    assert sftp.is_usable
    assert 1 < server.waiting_most <= IN_FLIGHT


def test_a_file_that_ends_early_gives_what_it_has() -> None:
    content = random.Random(3).randbytes(1_000_000)
    sftp = session(Server(file_server(content, ends_at=600_001)))
    assert sftp.read(b"h", [(0, 1_000_000), (600_000, 5), (700_000, 10)], doing="x") == [
        content[:600_001],
        content[600_000:600_001],
        b"",
    ]
    assert sftp.is_usable, "the next question finds no old answers"


def test_statuses_are_sentences_and_leave_the_session_usable() -> None:
    codes = {b"/none": 2, b"/secret": 3, b"/strange": 4}

    def answers(_kind: int, number: int, body: bytes) -> list[bytes]:
        path = body[4 : 4 + int.from_bytes(body[:4])]
        return [status(number, codes[path])]

    sftp = session(Server(answers))
    assert sftp.stat(PurePosixPath("/none")) is None
    assert sftp.listing(PurePosixPath("/none")) == []
    assert sftp.listing(PurePosixPath("/secret")) == []
    cases: list[tuple[Callable[[PurePosixPath], object], str, type[EvalError], str]] = [
        (sftp.stat, "/secret", StorageError, r"\[gpu\] permission is denied while looking at /secret \(said\)"),
        (sftp.listing, "/strange", StorageError, r"\[gpu\] the SFTP server refused .* while listing /strange"),
        (sftp.open, "/none", InputError, r"\[gpu\] there is no such file or directory while opening /none"),
    ]
    for ask, path, cls, words in cases:
        with pytest.raises(cls, match=words):
            ask(PurePosixPath(path))
        assert sftp.is_usable


def test_listings_have_any_names_and_their_own_attributes() -> None:
    entries = [(b".", 0o040755), (b"..", 0o040755), (b"caf\xe9", 0o100644), (b"dir", 0o040755), (b"link", 0o120777)]
    given = [0]

    def answers(kind: int, number: int, _body: bytes) -> list[bytes]:
        if kind == protocol.CMD_OPENDIR:
            return [packet(protocol.CMD_HANDLE, number, string(b"d"))]
        if kind == protocol.CMD_CLOSE:
            return [status(number, protocol.SFTP_OK)]
        if given[0] == len(entries):
            return [status(number, protocol.SFTP_EOF)]
        some = entries[given[0] : given[0] + 2]
        given[0] += len(some)
        attributes = [
            struct.pack(">IQIIIII", 0x8000000F, 7, 1, 2, mode, 10, 1_700_000_000)
            + struct.pack(">I", 1)
            + string(b"k")
            + string(b"v")
            for _, mode in some
        ]
        body = struct.pack(">I", len(some)) + b"".join(
            string(name) + string(b"long") + told for (name, _), told in zip(some, attributes, strict=True)
        )
        return [packet(protocol.CMD_NAME, number, body)]

    found = session(Server(answers)).listing(PurePosixPath("/d"))
    assert [name.encode("utf-8", "surrogateescape") for name, _ in found] == [b"caf\xe9", b"dir", b"link"]
    assert [(told.is_dir, told.is_link) for _, told in found] == [(False, False), (True, False), (False, True)]
    assert {(told.size_bytes, told.mtime_s) for _, told in found} == {(7, 1_700_000_000)}


@pytest.mark.parametrize(
    "broken",
    [
        b"Welcome to this host!\n",
        struct.pack(">I", 0),
        struct.pack(">IBI", 5, protocol.CMD_STATUS, 3),
        struct.pack(">IB", 1, protocol.CMD_HANDLE),
    ],
)
def test_a_server_that_greets_with_something_else_is_a_sentence(broken: bytes) -> None:
    with pytest.raises(HostError, match=r"\[gpu\] the host answered something that is not SFTP while starting SFTP") as caught:
        session(Server(lambda *_: [], greeting=broken))
    assert "~/.bashrc" in caught.value.fix


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: packet(protocol.CMD_DATA, number + 1, string(b"x")),
        lambda number: packet(protocol.CMD_HANDLE, number, string(b"x")),
        lambda number: packet(protocol.CMD_DATA, number, struct.pack(">I", 99) + b"short"),
        lambda _number: struct.pack(">IBH", 3, protocol.CMD_DATA, 1),
    ],
)
def test_broken_answers_are_sentences_and_end_the_session(answer: Callable[[int], bytes]) -> None:
    sftp = session(Server(lambda _kind, number, _body: [answer(number)]))
    with pytest.raises(HostError, match="not SFTP while reading /f"):
        sftp.read(b"h", [(0, 10)], doing="reading /f")
    assert not sftp.is_usable


def test_a_connection_that_ends_is_a_sentence() -> None:
    sftp = session(Server(lambda *_: []))
    with pytest.raises(HostError, match=r"\[gpu\] the connection ended while looking at /f"):
        sftp.stat(PurePosixPath("/f"))
    assert not sftp.is_usable
