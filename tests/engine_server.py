"""A test double of serving engines: a real HTTP server that speaks SGLang's and vLLM's protocols and their faults.

It is no engine, but its tokens and log-probabilities are real: it runs a model greedily. Field
names are those of SGLang 0.5 (/generate, /model_info) and vLLM (/v1/completions with return_token_ids).
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch


class Greedy:
    """A model's greedy continuations, each computed once, as far as it was asked for."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._chains: dict[tuple[int, ...], _Chain] = {}
        self._lock = threading.Lock()

    def go_on(self, ids: Sequence[int], count: int, stops: Sequence[int] = ()) -> tuple[list[int], list[float]]:
        """Up to `count` tokens and their log-probabilities, ended by the first of `stops`."""
        with self._lock:
            chain = self._chains.setdefault(tuple(ids), _Chain(self._model, ids))
            tokens: list[int] = []
            while len(tokens) < count and not (tokens and tokens[-1] in stops):
                tokens.append(chain.token(len(tokens)))
            return tokens, chain.logprobs[: len(tokens)]


class _Chain:
    """What follows one prompt, with the cache to go on."""

    def __init__(self, model: Any, ids: Sequence[int]) -> None:
        self._model, self._next, self._cache = model, list(ids), None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def token(self, place: int) -> int:
        while len(self.tokens) <= place:
            with torch.inference_mode():
                out = self._model(input_ids=torch.tensor([self._next]), cache=self._cache, use_cache=True)
            last, self._cache = out.logits[0, -1].float().log_softmax(-1), out.cache
            self._next = [int(last.argmax())]
            self.tokens += self._next
            self.logprobs.append(float(last.max()))
        return self.tokens[place]


class EngineServer(ThreadingHTTPServer):
    """One engine. Change its attributes to make it misbehave; look at `asked` and `counts` afterwards."""

    daemon_threads = True

    def __init__(self, greedy: Greedy, tokenizer: Any, *, model_path: str, own_stops: Sequence[int] = (2,)) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.greedy, self.tokenizer, self.own_stops = greedy, tokenizer, list(own_stops)
        self.info: dict[str, Any] = {"model_path": model_path, "weight_version": "default", "is_generation": True}
        self.models: list[dict[str, Any]] = [{"id": "served", "object": "model", "root": model_path, "max_model_len": 4096}]
        self.old_names = False
        self.spec: dict[str, Any] | None = None
        self.key: str | None = None
        self.faults: deque[str] = deque()
        self.after: tuple[int, Any] | None = None
        """(completions, what to do then): a restart half-way."""

        self.asked: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.released = threading.Event()
        self.defects: list[str] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error here; anything else is a defect of this double."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            self.defects.append(traceback.format_exc())

    def complete(
        self, ids: list[int], limit: int, *, ignore_eos: bool, stops: Sequence[int]
    ) -> tuple[list[int], list[float], str]:
        """(ids, log-probabilities, "stop" or "length")."""
        ends = [] if ignore_eos else [*self.own_stops, *stops]
        made, logprobs = self.greedy.go_on(ids, limit, ends)
        return made, logprobs, "stop" if made and made[-1] in ends else "length"


@contextmanager
def serving(server: EngineServer) -> Iterator[EngineServer]:
    """Serve while the body runs."""
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
    assert not server.defects, "".join(server.defects)


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        """Who the server is."""
        self.server.counts["GET"] += 1
        info = "/get_model_info" if self.server.old_names else "/model_info"
        if not self._let_in():
            return
        if self.path == info:
            self._say(200, self.server.info)
        elif self.path == "/v1/models":
            self._say(200, {"object": "list", "data": self.server.models})
        else:
            self._say(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """A completion, or the next fault."""
        question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._let_in():
            return
        with self.server.lock:
            going_on = question.get("ignore_eos") or (question.get("sampling_params") or {}).get("ignore_eos")
            kind = "go on" if going_on else "completion"
            self.server.counts[kind] += 1
            self.server.asked.append({"path": self.path, **question})
            fault = self.server.faults.popleft() if kind == "completion" and self.server.faults else ""
        if fault and self._misbehave(fault):
            return
        answer = {"/generate": self._generate, "/v1/completions": self._completions}.get(self.path)
        if answer is None:
            self._say(404, {"detail": "Not Found"})
            return
        self._say(200, answer(question, fault))
        with self.server.lock:
            if self.server.after and self.server.counts["completion"] >= self.server.after[0]:
                self.server.after[1]()
                self.server.after = None

    def _let_in(self) -> bool:
        allowed = self.server.key is None or self.headers.get("Authorization") == f"Bearer {self.server.key}"
        if not allowed:
            self._say(401, {"error": "who are you? you said " + str(self.headers.get("Authorization"))})
        return allowed

    def _misbehave(self, fault: str) -> bool:
        """True where the fault is the whole answer."""
        if fault.isdigit():
            self._say(int(fault), {"error": "not now"}, {"Retry-After": "0"})
        elif fault == "hang":
            self.server.released.wait(20)
            self.close_connection = True
        elif fault == "drop":
            self.close_connection = True
        elif fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"output_ids": [1, 2')
            self.close_connection = True
        elif fault in ("rubbish", "list"):
            self._say(200, [1] if fault == "list" else "<html>Bad gateway</html>")
        else:
            return False
        return True

    def _generate(self, question: dict[str, Any], fault: str) -> dict[str, Any]:
        sampling, prompt = question["sampling_params"], question["input_ids"]
        ids, logprobs, end = self.server.complete(
            prompt, sampling["max_new_tokens"], ignore_eos=sampling["ignore_eos"], stops=sampling.get("stop_token_ids", [])
        )
        ids, told, counted = _bent(ids, prompt, fault)
        answer = {
            "text": "?" if fault == "other text" else self._text(ids, end),
            "output_ids": told,
            "meta_info": {
                "id": "r",
                "finish_reason": {"type": end, "matched": ids[-1]} if end == "stop" else {"type": end, "length": len(ids)},
                "prompt_tokens": len(prompt) - (fault == "truncated prompt"),
                "completion_tokens": counted,
                "cached_tokens": 0,
                "weight_version": self.server.info.get("weight_version"),
                "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
                **(self.server.spec or {}),
            },
        }
        if fault == "no ids":
            del answer["output_ids"], answer["meta_info"]["output_token_logprobs"]
        return answer

    def _completions(self, question: dict[str, Any], fault: str) -> dict[str, Any]:
        prompt = question["prompt"]
        with_ids = bool(question.get("return_token_ids"))
        prompt_ids = self.server.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        ids, logprobs, end = self.server.complete(
            prompt_ids,
            question.get("max_tokens", 16),
            ignore_eos=bool(question.get("ignore_eos")),
            stops=question.get("stop_token_ids") or [],
        )
        ids, told, counted = _bent(ids, prompt_ids, fault)
        choice: dict[str, Any] = {
            "index": 0,
            "text": "?" if fault == "other text" else self._text(ids, end),
            "finish_reason": end,
            "stop_reason": None,
            "logprobs": None,
        }
        if question.get("logprobs") is not None:
            choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [str(token) for token in ids]}
        if with_ids and fault != "no ids":
            choice |= {"token_ids": told, "prompt_token_ids": list(prompt_ids)[: -1 if fault == "truncated prompt" else None]}
        usage = {"prompt_tokens": len(prompt_ids), "completion_tokens": counted, "total_tokens": len(prompt_ids) + counted}
        metrics = {"speculative_decoding": self.server.spec} if self.server.spec else None
        return {"id": "c", "object": "text_completion", "choices": [choice], "usage": usage, "metrics": metrics}

    def _text(self, ids: list[int], end: str) -> str:
        shown = ids[:-1] if end == "stop" else ids
        return str(self.server.tokenizer.decode(shown, skip_special_tokens=True))

    def _say(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _bent(ids: list[int], prompt: Sequence[int], fault: str) -> tuple[list[int], list[int], int]:
    """(ids the rest of the answer speaks of, ids told, tokens counted)."""
    told, counted = list(ids), len(ids)
    if fault == "prompt tail":
        told = [*prompt[-3:], *ids]
    elif fault == "no stop token":
        told = ids[:-1]
    elif fault == "miscounted":
        counted = len(ids) + 2
    elif fault == "foreign id":
        told = [*ids[:-1], 100_000]
    elif fault == "none":
        told = []
    return ids, told, counted
