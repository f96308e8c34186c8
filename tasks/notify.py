"""Telling people how a run ended: one POST of Slack-compatible JSON to a webhook, tried again with backoff.

The address is a secret: it is read where it is used, and neither logs nor errors name more of it than its host.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3.util.retry import Retry

from dflash_model.errors import ConfigError

log = logging.getLogger(__name__)

WEBHOOK_VARIABLE = "DFLASH_EVAL_WEBHOOK"
TRIES, BACKOFF_S, TIMEOUT_S = 4, 2.0, (5.0, 10.0)
"""At worst a receiver that never answers holds a run for about a minute."""
SLACK_LIMIT = 2900


def webhook_url(secret_block: str | None) -> str | None:
    """The address from the Prefect Secret block, else from the environment; None: nobody is to be told.

    Raises ConfigError for a block that is not there or an address that is none, without naming it.
    """
    url = _of_block(secret_block) if secret_block is not None else os.environ.get(WEBHOOK_VARIABLE)
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError("The webhook's address is not an http or https address.", f"Correct {WEBHOOK_VARIABLE} or the block.")
    return url


def _of_block(name: str) -> str:
    from prefect.blocks.system import Secret

    try:
        value = Secret.load(name, _sync=True).get()  # type: ignore[call-arg, union-attr]
    except ValueError as exc:
        raise ConfigError(f"There is no Prefect Secret block {name}.", "Create it in the UI under Blocks.") from exc
    return str(value)


def slack_message(headline: str, lines: list[str]) -> dict[str, Any]:
    """{"text", "blocks"}: `text` is what a notification shows, the blocks what the channel shows."""
    body = "\n".join([f"*{_escaped(headline)}*", *[_escaped(line) for line in lines]])
    section = {"type": "section", "text": {"type": "mrkdwn", "text": body[:SLACK_LIMIT]}}
    return {"text": _escaped(headline), "blocks": [section]}


def _escaped(text: str) -> str:
    """Slack's three control characters, in words of its API."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def deliver(url: str, message: Mapping[str, Any]) -> bool:
    """POST `message` to `url`; again on connection errors, 429 and 5xx. Never raises: a run does not fail for its news."""
    host = urlsplit(url).hostname
    retry = Retry(
        total=TRIES - 1,
        backoff_factor=BACKOFF_S,
        backoff_jitter=BACKOFF_S / 2,
        status_forcelist=(429, 500, 502, 503, 504),
        allowed_methods=("POST",),
        raise_on_status=False,
        respect_retry_after_header=False,
    )
    with requests.Session() as session, _quiet_urllib3():
        session.mount(f"{urlsplit(url).scheme}://", HTTPAdapter(max_retries=retry))
        try:
            answer = session.post(url, json=dict(message), timeout=TIMEOUT_S, allow_redirects=False)
        except requests.RequestException as exc:
            log.warning("the webhook at %s was not reached (%s)", host, type(exc).__name__)
            return False
    if not answer.ok:
        log.warning("the webhook at %s answered %s", host, answer.status_code)
    return bool(answer.ok)


@contextmanager
def _quiet_urllib3() -> Iterator[None]:
    """urllib3 logs the paths that it asks for; with a webhook the path is the secret."""
    for name in _CHATTY:
        logging.getLogger(name).addFilter(_drop)
    try:
        yield
    finally:
        for name in _CHATTY:
            logging.getLogger(name).removeFilter(_drop)


_CHATTY = ("urllib3.connectionpool", "urllib3.util.retry", "requests")


def _drop(_record: logging.LogRecord) -> bool:
    return False
