"""A webhook receiver on loopback that answers as told and keeps what it was sent."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0K3N-that-nobody-may-see"


class Receiver:
    """What arrived, and how it answers: status codes in turn, the last one for good; None: never."""

    def __init__(self, *answers: int | None) -> None:
        self.answers = list(answers)
        self.messages: list[dict[str, Any]] = []
        self.released = threading.Event()
        self.url = ""

    @property
    def text(self) -> str:
        """Everything of the last message that people read."""
        message = self.messages[-1]
        return "\n".join([message["text"], *[block["text"]["text"] for block in message["blocks"]]])


@contextmanager
def receiving(*answers: int | None) -> Iterator[Receiver]:
    """A receiver whose address ends in SECRET."""
    receiver = Receiver(*answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0]
            if answer is None:
                receiver.released.wait(30)
                return
            self.send_response(answer)
            self.send_header("Content-Length", "0")
            self.send_header("Retry-After", "3600")
            self.end_headers()

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/services/{SECRET}"
    try:
        yield receiver
    finally:
        receiver.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
