"""Reads asked for before they are wanted: the same bytes, a bounded number under way, and no harm where the guess was wrong."""

import random

import pytest

from dflash_model.errors import StorageError
from tasks.remote.read_ahead import ReadAhead
from tasks.remote.sftp import IN_FLIGHT, REQUEST_BYTES
from tests.test_sftp import Server, file_server, session, status

CONTENT = random.Random(7).randbytes(12_000_000)
RANGES = [(b"h", 5_000_000, 3_000_000), (b"h", 10, 1), (b"h", 0, 0), (b"h", 8_000_000, 2_500_001)]


def ahead_of(server: Server) -> ReadAhead:
    return ReadAhead(session(server))


@pytest.mark.parametrize("most", [1 << 30, 50_001])
@pytest.mark.parametrize("step", [1 << 22, 100_003])
def test_foreseen_ranges_come_in_any_steps_whatever_order_the_answers_have(most: int, step: int) -> None:
    server = Server(file_server(CONTENT, most=most), seed=step)
    ahead = ahead_of(server)
    ahead.expect(RANGES, doing="reading /f")
    for handle, offset, size in RANGES:
        for begin in range(offset, offset + size, step):
            part = min(step, offset + size - begin)
            found = ahead.take(handle, begin, part)
            assert found is not None
            assert b"".join(found) == CONTENT[begin : begin + part]
    assert IN_FLIGHT // 2 < server.waiting_most <= IN_FLIGHT, "many under way, and not without bound"
    assert ahead.take(b"h", 0, 1) is None, "nothing is foreseen any more"


def test_a_read_that_was_not_foreseen_is_not_answered_with_foreseen_bytes() -> None:
    sftp = session(Server(file_server(CONTENT)))
    ahead = ReadAhead(sftp)
    ahead.expect([(b"h", 0, 4_000_000)], doing="reading /f")
    assert ahead.take(b"h", 0, 1000) is not None
    for handle, offset, size in ((b"h", 999, 10), (b"h", 1001, 10), (b"g", 1000, 10), (b"h", 1000, 4_000_000)):
        assert ahead.take(handle, offset, size) is None
    assert sftp.is_owed
    assert not sftp.is_usable, "nobody else may ask now"
    ahead.forget()
    assert sftp.is_usable
    assert sftp.read(b"h", [(7, 20)], doing="x") == [CONTENT[7:27]]


def test_a_file_that_ends_early_gives_what_it_has_and_ends_the_foresight() -> None:
    sftp = session(Server(file_server(CONTENT, ends_at=600_001)))
    ahead = ReadAhead(sftp)
    ahead.expect([(b"h", 0, 1_000_000), (b"h", 5, 5)], doing="x")
    found = ahead.take(b"h", 0, 1_000_000)
    assert found is not None
    assert b"".join(found) == CONTENT[:600_001]
    assert ahead.take(b"h", 5, 5) is None
    assert sftp.is_usable


def test_a_refusal_is_a_sentence_and_the_session_can_be_used_again() -> None:
    answers = file_server(CONTENT)

    def failing(kind: int, number: int, body: bytes) -> list[bytes]:
        return [status(number, 4, b"I/O")] if number % 3 == 0 else answers(kind, number, body)

    sftp = session(Server(failing))
    ahead = ReadAhead(sftp)
    ahead.expect([(b"h", 0, 4 * REQUEST_BYTES)], doing="reading /f")
    with pytest.raises(StorageError, match=r"\[gpu\] the SFTP server refused .* while reading /f \(I/O\)"):
        ahead.take(b"h", 0, 4 * REQUEST_BYTES)
    while sftp.is_owed:
        try:
            ahead.forget()
        except StorageError:
            continue
    assert sftp.is_usable
