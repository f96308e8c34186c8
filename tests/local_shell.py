"""A Shell that reaches this machine, over a link that tests can cut, slow down, or make lose answers."""

import subprocess
import threading
import time
from pathlib import Path, PurePosixPath

from dflash_model.errors import HostError
from tasks.remote.shell import Completed


class LocalShell:
    """Real `sh`, real files; the faults are in the link alone."""

    def __init__(self, name: str = "h") -> None:
        self.name = name
        self.scripts: list[str] = []
        self.written: list[PurePosixPath] = []
        self.delay_s = 0.0
        self._down_until = 0.0
        self._answers_to_lose: list[str] = []
        self._lock = threading.Lock()
        self.failures = 0

    def cut(self, seconds: float = float("inf")) -> None:
        """Every call fails from now on, for so long."""
        self._down_until = time.monotonic() + seconds

    def lose_answer(self, part_of_script: str) -> None:
        """The next script that holds this text runs, but its answer is lost."""
        self._answers_to_lose.append(part_of_script)

    def run(self, script: str, *, timeout_s: float, stdin: bytes = b"") -> Completed:
        self._cross()
        self.scripts.append(script)
        try:
            done = subprocess.run(["sh", "-c", script], input=stdin, capture_output=True, timeout=timeout_s, cwd="/", check=False)
        except subprocess.TimeoutExpired as exc:
            raise HostError(f"[{self.name}] a script took more than {timeout_s:g} s.", "Try again.") from exc
        self._cross()
        for text in self._answers_to_lose:
            if text in script:
                self._answers_to_lose.remove(text)
                self._fail()
        return Completed(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def read_from(self, path: PurePosixPath, offset: int, *, limit: int = 1 << 20) -> bytes:
        self._cross()
        try:
            with Path(path).open("rb") as file:
                file.seek(offset)
                content = file.read(limit)
        except FileNotFoundError:
            return b""
        self._cross()
        return content

    def write_small(self, path: PurePosixPath, content: bytes) -> None:
        self._cross()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        part = Path(f"{path}.part")
        part.write_bytes(content)
        part.replace(path)
        with self._lock:
            self.written.append(path)

    def _cross(self) -> None:
        time.sleep(self.delay_s)
        if time.monotonic() < self._down_until:
            self._fail()

    def _fail(self) -> None:
        self.failures += 1
        raise HostError(f"[{self.name}] the link is down.", "Check the network.")
