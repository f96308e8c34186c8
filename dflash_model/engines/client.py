"""JSON over HTTP to one engine. urllib3 does the retries; every way to fail ends here in one sentence of ours.

What is asked changes nothing on the server, so a POST may be sent again after a cut connection. A read that timed out is
not repeated: it would wait as long again. Redirects are not followed: the key would go with them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from types import TracebackType
from typing import Any, Self

import urllib3
from urllib3.exceptions import (
    HTTPError,
    InvalidHeader,
    MaxRetryError,
    NameResolutionError,
    ProtocolError,
    ReadTimeoutError,
    ResponseError,
    SSLError,
)
from urllib3.util.retry import Retry

from dflash_model.engines.access import ServerAccess
from dflash_model.errors import EvalError, HostBusy, InputError, StageError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
BUSY = (429, 502, 503, 504)
BACKOFF_S, BACKOFF_MAX_S, JITTER_S = 0.5, 30.0, 0.5
RETRY_AFTER_MAX_S = 60
QUOTED = 160


class _Patience(Retry):
    def increment(
        self,
        method: str | None = None,
        url: str | None = None,
        response: Any = None,
        error: Exception | None = None,
        _pool: Any = None,
        _stacktrace: TracebackType | None = None,
    ) -> Self:
        """As urllib3 counts, but a read that timed out is final."""
        if isinstance(error, ReadTimeoutError):
            raise error
        return super().increment(method, url, response, error, _pool, _stacktrace)


class JsonClient:
    """One engine. Safe to use from several threads."""

    def __init__(self, access: ServerAccess, *, backoff_s: float = BACKOFF_S) -> None:
        """Reads the key. Raises InputError."""
        self.access = access
        self.sent: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._key = access.read_key()
        self._base = access.url.rstrip("/")
        self._pool = urllib3.PoolManager(
            maxsize=access.concurrency + 1,
            timeout=urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, access.timeout_s), read=access.timeout_s),
            retries=_Patience(
                total=access.retries,
                redirect=0,
                raise_on_redirect=False,
                allowed_methods=None,
                status_forcelist=BUSY,
                raise_on_status=False,
                backoff_factor=backoff_s,
                backoff_max=BACKOFF_MAX_S,
                backoff_jitter=JITTER_S if backoff_s else 0.0,
                retry_after_max=RETRY_AFTER_MAX_S,
            ),
        )

    def get(self, path: str) -> Any:
        """The JSON value at `path`; None where the server has no such page. Raises EvalError."""
        status, body = self._request("GET", path, None, counted_as="looks")
        return None if status in (404, 405) else self._value(path, status, body)

    def post(self, path: str, question: dict[str, Any], *, counted_as: str) -> dict[str, Any]:
        """The JSON object that answers `question`. Raises EvalError."""
        status, body = self._request("POST", path, question, counted_as=counted_as)
        if status in (404, 405):
            raise InputError(
                f"{self._base} has no {path}: {self._quoted(body)}.",
                "Name the protocol that it speaks: --references-from sglang, openai or openai-text.",
            )
        value = self._value(path, status, body)
        if not isinstance(value, dict):
            raise self._rubbish(path, body)
        return value

    def close(self) -> None:
        """Give up idle connections."""
        self._pool.clear()

    def _request(self, method: str, path: str, question: dict[str, Any] | None, *, counted_as: str) -> tuple[int, bytes]:
        with self._lock:
            self.sent[counted_as] += 1
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        options: dict[str, Any] = {} if question is None else {"json": question}
        try:
            response = self._pool.request(method, f"{self._base}{path}", headers=headers, **options)
        except (HTTPError, InvalidHeader) as exc:
            raise self._translated(exc, path) from exc
        return response.status, response.data

    def _value(self, path: str, status: int, body: bytes) -> Any:
        """The parsed body of a 200; anything else raises."""
        if status in (401, 403):
            raise InputError(
                f"{self._base} refuses us ({status}): {'our key is not accepted' if self._key else 'it wants a key'}.",
                f"Put the key into ${self.access.api_key_env} on the host that asks, or into a file (`api_key_file`).",
            )
        if status in BUSY:
            raise HostBusy(
                f"{self._base} is busy: {status} to {path} after {self.access.retries + 1} tries.", "Run again when it has room."
            )
        if 400 <= status < 500:
            raise InputError(f"{self._base} refuses the request to {path} ({status}): {self._quoted(body)}.", "See its log.")
        if status != 200:
            raise StageError(f"{self._base} answered {status} to {path}: {self._quoted(body)}.", "See its log, then run again.")
        try:
            return json.loads(body)
        except ValueError:
            raise self._rubbish(path, body) from None

    def _rubbish(self, path: str, body: bytes) -> StageError:
        return StageError(
            f"{self._base} answered {path} with 200 and something that is no JSON object: {self._quoted(body)}.",
            "Look whether a proxy answers in its place.",
        )

    def _quoted(self, body: bytes) -> str:
        """The head of a body for a sentence, without our key, should the server repeat it."""
        text = " ".join(body[: 4 * QUOTED].decode("utf-8", "replace").split())
        if self._key:
            text = text.replace(self._key, "***")
        return f"{text[:QUOTED]!r}" if text else "nothing"

    def _translated(self, exc: HTTPError | InvalidHeader, path: str) -> EvalError:
        """Every error of urllib3 in our words."""
        reason: Any = exc.reason if isinstance(exc, MaxRetryError) else exc
        if isinstance(reason, ReadTimeoutError):
            return StageError(
                f"{self._base} did not answer {path} within {self.access.timeout_s:g} s.",
                "See whether it hangs; a long completion needs a longer `timeout_s`.",
            )
        tries = f"after {self.access.retries + 1} tries"
        if isinstance(reason, NameResolutionError):
            return InputError(f"The name in {self._base} is not known on this host.", "Give the address as this host sees it.")
        if isinstance(reason, SSLError):
            return InputError(
                f"{self._base} cannot be trusted: {reason}.", "Name its certificate authority in SSL_CERT_FILE, or use http://."
            )
        if isinstance(reason, ProtocolError):
            return HostBusy(f"{self._base} cut the connection {tries}.", "See whether it still runs, then run again.")
        if isinstance(reason, ResponseError | InvalidHeader):
            return StageError(
                f"{self._base} answered {path} with nonsense: {reason}.", "Look whether a proxy answers in its place."
            )
        log.info("%s: %s", self._base, reason)
        return HostBusy(f"{self._base} cannot be reached {tries}.", "Start it, or give the address as this host sees it.")
