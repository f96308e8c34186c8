"""Telling the webhook: tried again, never for ever, and its address stays a secret."""

import logging
import socket

import pytest

from dflash_model.errors import ConfigError
from tasks import notify
from tasks.notify import deliver, slack_message, webhook_url
from tests.webhook_receiver import SECRET, receiving

MESSAGE = slack_message("new is worse than old", ["new: tau 4.20", "Report: /runs/a/report.html"])


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "BACKOFF_S", 0.01)
    monkeypatch.setattr(notify, "TIMEOUT_S", (0.5, 0.2))


def test_a_message_has_the_form_that_slack_reads() -> None:
    message = slack_message("a < b & c", ["first", "second > third"])
    assert message["text"] == "a &lt; b &amp; c"
    (block,) = message["blocks"]
    assert block == {"type": "section", "text": {"type": "mrkdwn", "text": "*a &lt; b &amp; c*\nfirst\nsecond &gt; third"}}


def test_500_twice_then_200_is_delivered_once_it_answers() -> None:
    with receiving(500, 500, 200) as receiver:
        assert deliver(receiver.url, MESSAGE)
    assert receiver.messages == [MESSAGE] * 3


@pytest.mark.parametrize("answer", [500, 404, None])
def test_a_receiver_that_stays_bad_is_given_up_and_nothing_says_its_address(
    answer: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with receiving(answer) as receiver, caplog.at_level(logging.DEBUG):
        assert not deliver(receiver.url, MESSAGE)
    assert len(receiver.messages) == (1 if answer == 404 else notify.TRIES)
    assert "127.0.0.1" in caplog.text
    assert SECRET not in caplog.text


def test_urllib3_would_have_said_the_address(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "_CHATTY", ())
    with receiving(500) as receiver, caplog.at_level(logging.DEBUG):
        deliver(receiver.url, MESSAGE)
    assert SECRET in caplog.text


def test_nobody_listening_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    assert not deliver(f"http://127.0.0.1:{port}/{SECRET}", MESSAGE)
    assert "was not reached (ConnectionError)" in caplog.text
    assert SECRET not in caplog.text


def test_the_address_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(notify.WEBHOOK_VARIABLE, raising=False)
    assert webhook_url(None) is None
    monkeypatch.setenv(notify.WEBHOOK_VARIABLE, f"https://hooks.example/{SECRET}")
    assert webhook_url(None) == f"https://hooks.example/{SECRET}"


def test_an_address_that_is_none_is_refused_without_naming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(notify.WEBHOOK_VARIABLE, f"hooks.example/{SECRET}")
    with pytest.raises(ConfigError) as caught:
        webhook_url(None)
    assert SECRET not in str(caught.value)
