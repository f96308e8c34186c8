"""find_artifact over a Shell: the answer of dflash_model.storage.find_artifact, without Python on the host.

Each round trip asks for the manifests of all parts just learnt of and the sizes of all files just learnt of, so an
artifact with a hundred parts costs three round trips, as one with a single part does.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from dflash_model.artifacts import Manifest
from dflash_model.storage import MANIFEST_NAME
from tasks.remote.command import quote
from tasks.remote.ssh_errors import script_failed
from tasks.remote.ssh_shell import SshShell

LOOK_S = 120.0
NAMES_AT_ONCE = 500
NO_DIRECTORY = "none"
_TOOLS = """export LC_ALL=C
exec 2>/dev/null
if stat -L -c %s /; then sizes() { stat -L -c %s -- "$@"; }
elif stat -L -f %z /; then sizes() { stat -L -f %z -- "$@"; }
else sizes() { for f in "$@"; do wc -c < "$f"; done; }
fi >/dev/null
"""


def find_artifact(shell: SshShell, directory: PurePosixPath, key: str) -> Manifest | None:
    """The manifest of `key` below `directory` if it and its parts are there with the right sizes, else None.

    Raises HostError where the host cannot be asked.
    """
    found: dict[str, Manifest] = {}
    wanted: list[str] = [key]
    unmeasured: dict[str, Manifest] = {}
    while wanted or unmeasured:
        answers = _ask(shell, directory, wanted, unmeasured)
        complete = [
            _sizes(answer) == [f.size_bytes for f in m.files]
            for answer, m in zip(answers[len(wanted) :], unmeasured.values(), strict=True)
        ]
        manifests = [_manifest(answer) for answer in answers[: len(wanted)]]
        if not all(complete) or None in manifests:
            return None
        unmeasured = {name: manifest for name, manifest in zip(wanted, manifests, strict=True) if manifest is not None}
        found |= unmeasured
        wanted = sorted({part for manifest in unmeasured.values() for part in manifest.parts} - set(found))
    agree = all(found[part].digest == digest for manifest in found.values() for part, digest in manifest.parts.items())
    return found[key] if agree else None


def _ask(shell: SshShell, directory: PurePosixPath, wanted: Sequence[str], unmeasured: Mapping[str, Manifest]) -> list[bytes]:
    """The content of each wanted manifest (b"" for none), then the sizes of each measured artifact's files, a line each."""
    doing = f"looking for {next(iter([*wanted, *unmeasured]))}"
    # Nothing in a manifest is a random word, so it ends an answer; the script is not bound by a command line's length.
    end = secrets.token_hex(16)
    lines = [_TOOLS, f"cd -- {quote(directory)} || {{ printf {NO_DIRECTORY}; exit 0; }}"]
    for key in wanted:
        path = quote(f"./{key}/{MANIFEST_NAME}")
        lines.append(f"if [ -f {path} ]; then cat {path}; fi; printf %s {end}")
    for key, manifest in unmeasured.items():
        names = [quote(entry.name) for entry in manifest.files]
        some = [" ".join(names[begin : begin + NAMES_AT_ONCE]) for begin in range(0, len(names), NAMES_AT_ONCE)]
        measure = "; ".join(f"sizes {words}" for words in some)
        lines.append(f"(cd {quote(f'./{key}')} && {{ {measure or ':'}; }}); printf %s {end}")
    done = shell.run_for(doing, "exec sh -s", stdin="\n".join([*lines, ""]).encode("utf-8", "surrogateescape"), timeout_s=LOOK_S)
    answers = done.stdout.split(end.encode())[:-1]
    expected = len(wanted) + len(unmeasured)
    if done.exit_code == 0 and done.stdout == NO_DIRECTORY.encode():
        return [b""] * expected
    if done.exit_code != 0 or len(answers) != expected:
        raise script_failed(shell.name, doing, exit_code=done.exit_code, stderr=done.stderr)
    return answers


def _manifest(content: bytes) -> Manifest | None:
    """The manifest, None where there is none or it is damaged."""
    try:
        return Manifest.from_json(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _sizes(answer: bytes) -> list[int]:
    """One size a line; a file that is missing has no line, so the lists differ."""
    lines = answer.split()
    return [int(line) for line in lines] if all(line.isdigit() for line in lines) else [-1]
