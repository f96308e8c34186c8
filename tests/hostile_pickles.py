"""Pickles that an honest trainer never writes, and a program that loads each in a child and says what it cost.

    python tests/hostile_pickles.py DIRECTORY [--unprotected]

Every pickle of `executing` creates the file DIRECTORY/marker when Python's own unpickler loads it. The last line of stdout
is a JSON object: name -> {outcome, seconds, megabytes}. The child does what the readers do with a loaded object: walks,
renders and prints it. With --unprotected the dangerous ones are loaded by pickle.loads: name -> whether the marker came.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
import sys
import time
import traceback
from pathlib import Path

from dflash_model.checkpoint.object_tree import find_tensors
from dflash_model.checkpoint.plain import render_plain
from dflash_model.checkpoint.symbolic import load_symbolic
from dflash_model.errors import CheckpointError

P4 = b"\x80\x04"


def short(text: str) -> bytes:
    """SHORT_BINUNICODE."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


def text(value: str) -> bytes:
    """BINUNICODE."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def executing(marker: str) -> dict[str, bytes]:
    """Pickles that make a real unpickler run `touch MARKER`, by every opcode that calls something."""
    command = f"touch {marker}"
    opening = f"open({marker!r}, 'w')"
    system = b"cposix\nsystem\n"
    argument = text(command)
    return {
        "reduce": P4 + system + argument + b"\x85R.",
        "stack_global": P4 + short("posix") + short("system") + b"\x93" + argument + b"\x85R.",
        "eval": P4 + b"cbuiltins\neval\n" + text(opening) + b"\x85R.",
        "python2_name": b"\x80\x02c__builtin__\neval\n" + text(opening) + b"\x85R.",
        "getattr": P4 + b"cbuiltins\ngetattr\n" + b"cos\nsystem\n" + short("__call__") + b"\x86R" + argument + b"\x85R.",
        "newobj": P4 + b"ctrap\nNew\n)\x81.",
        "newobj_ex": P4 + b"ctrap\nNew\n)}\x92.",
        "build": P4 + b"ctrap\nState\n)\x81}b.",
        "setitem": P4 + b"ctrap\nItems\n)\x81NNs.",
        "append": P4 + b"ctrap\nItems\n)\x81Na.",
        "inst": b"(" + b"V" + command.encode() + b"\niposix\nsystem\n.",
        "obj": b"(" + system + argument + b"o.",
        "in_key": P4 + b"}" + system + argument + b"\x85R" + b"Ns.",
        "in_set": P4 + b"\x8f(" + system + argument + b"\x85R" + b"\x90.",
        "in_ordered_dict": P4 + b"ccollections\nOrderedDict\n]" + system + argument + b"\x85RN\x86a\x85R.",
        "in_default_dict": P4 + b"ccollections\ndefaultdict\n" + system + argument + b"\x85R\x85R.",
        "import_only": b"ctrap_on_import\nanything\n.",
    }


def costly() -> dict[str, bytes]:
    """Pickles that make a careless reader use up time, memory or its stack."""
    doubling = b"".join(b"2\x86" for _ in range(40))
    laughs = b"(]\x94" + b"".join(b"](" + (b"h" + bytes([depth])) * 10 + b"e\x94" for depth in range(30)) + b"l"
    colliding = b"".join(pickle.dumps(i * ((1 << 61) - 1), 2)[2:-1] + b"N" for i in range(40_000))
    megabyte = "x" * 1_000_000
    pairs = b"]" + b"(" + b"".join(b"K\x01N\x86" for _ in range(50_000)) + b"e"
    return {
        "nested_lists": b"]" * 200_000 + b"a" * 199_999 + b".",
        "nested_tuples": b")" + b"\x85" * 200_000 + b".",
        "nested_dicts": b"}" + b"K\x01}" * 100_000 + b"s" * 100_000 + b".",
        "nested_nodes": b"c__main__\nA\n" + b")\x81" + b"c__main__\nA\n)\x81" * 50_000 + b"b" * 50_000 + b".",
        "nested_marks": b"(" * 200_000 + b"l" * 200_000 + b".",
        "itself": b"]\x94h\x00a.",
        "itself_in_dict": b"}\x94" + short("a") + b"h\x00s.",
        "memo_bomb": b"N" + b"r" + b"\xff\xff\xff\xff" + b".",
        "memo_text_bomb": b"Np" + b"9" * 4000 + b"\n.",
        "memo_flood": b"]" + b"\x94" * 3_000_000 + b".",
        "list_flood": b"(" + b"]" * 3_000_000 + b"l.",
        "dict_flood": b"(" + b"}NNs" * 800_000 + b"l.",
        "set_flood": b"(" + b"\x8f" * 3_000_000 + b"l.",
        "dup_flood": b"(]" + b"2" * 3_000_000 + b"l.",
        "node_flood": b"(c__main__\nA\n\x94" + b"h\x00)R" * 700_000 + b"l.",
        "long_text": b"L" + b"9" * 1_000_000 + b"L\n.",
        "long4_claims": b"\x8b" + b"\xff\xff\xff\x7f" + b"\x01.",
        "long4_real": b"\x8b" + struct.pack("<I", 2_000_000) + b"\x7f" * 2_000_000 + b".",
        "text8_claims": P4 + b"\x8d" + struct.pack("<Q", 1 << 40) + b"a.",
        "bytes8_claims": P4 + b"\x8e" + struct.pack("<Q", 1 << 60) + b"a.",
        "bytearray8_claims": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"a.",
        "frame_claims": P4 + b"\x95" + struct.pack("<Q", 1 << 60) + b"N.",
        "hash_bomb": b"})" + doubling + b"Ns.",
        "hash_bomb_in_set": b"\x8f()" + doubling + b"\x90.",
        "colliding_keys": b"}(" + colliding + b"u.",
        "laughs": laughs + b".",
        "encode_again_and_again": (b"(c_codecs\nencode\n\x94" + text(megabyte) + b"\x94" + short("latin1") + b"\x94")
        + b"h\x00h\x01h\x02\x86R" * 20_000
        + b"l.",
        "ordered_dict_again_and_again": b"(ccollections\nOrderedDict\n\x94"
        + pairs
        + b"\x94"
        + b"h\x00h\x01\x85R" * 20_000
        + b"l.",
        "almost_pairs_again_and_again": b"(ccollections\nOrderedDict\n\x94"
        + pairs
        + b"Na\x94"
        + b"h\x00h\x01\x85R" * 20_000
        + b"l.",
        "too_long": b"N0" * (20 << 20) + b"N.",
    }


def malformed() -> dict[str, bytes]:
    """Bytes that are no pickle, or that ask for what does not exist."""
    return {
        "empty": b"",
        "extension": P4 + b"\x82\x01.",
        "garbage": bytes(range(1, 200)),
        "cut": pickle.dumps({"a": list(range(100))})[:60],
        "underflow": b"\x86.",
        "pop_without_mark": b"0.",
        "mark_missing": b"e.",
        "unknown_memo": b"h\x07.",
        "set_on_number": b"K\x01NNs.",
        "append_to_number": b"K\x01Na.",
        "odd_items": b"}(Nu.",
        "two_results": b"NN.",
        "name_is_number": b"K\x01K\x02\x93.",
        "protocol_99": b"\x80\x63N.",
        "text_persid": b"Pstorage\n.",
        "next_buffer": b"\x80\x05\x97.",
        "readonly_buffer": b"\x80\x05N\x98.",
        "bad_utf8": b"X\x02\x00\x00\x00\xff\xfe.",
        "bad_float": b"Fnine\n.",
    }


def use(data: bytes) -> str:
    """Load, walk, render and print, as the readers do; "refused" or "inert"."""
    try:
        loaded = load_symbolic(data, what="The pickle")
        repr(find_tensors(loaded, "The file"))
        json.dumps(render_plain(loaded))
    except CheckpointError as exc:
        return f"refused: {exc.problem}"
    return "inert"


def measure(data: bytes) -> dict[str, object]:
    """What loading cost, in a child of its own: CPU seconds and how far its memory grew."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            started = time.process_time()
            outcome = use(data)
            seconds = time.process_time() - started
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            answer = {"outcome": outcome, "seconds": seconds, "megabytes": grown}
        except BaseException:  # noqa: BLE001 - whatever escapes is the finding
            answer = {"outcome": f"escaped: {traceback.format_exc()[-300:]}", "seconds": 0.0, "megabytes": 0.0}
        os.write(write_end, json.dumps(answer).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answers:
        found = answers.read()
    os.waitpid(child, 0)
    return json.loads(found) if found else {"outcome": "escaped: the child died", "seconds": 0.0, "megabytes": 0.0}


def traps(directory: Path) -> None:
    """Modules whose import, construction or state touches the marker."""
    touch = f"import pathlib\n\ndef touch():\n    pathlib.Path({str(directory / 'marker')!r}).touch()\n\n"
    (directory / "trap_on_import.py").write_text(f"{touch}touch()\nanything = 1\n")
    (directory / "trap.py").write_text(
        f"{touch}class New:\n    def __new__(cls):\n        touch()\n        return object.__new__(cls)\n\n"
        "class State:\n    def __setstate__(self, state):\n        touch()\n\n"
        "class Items:\n    def __setitem__(self, key, value):\n        touch()\n\n    def append(self, value):\n        touch()\n"
    )


def runs_unprotected(data: bytes, marker: Path) -> bool:
    """Whether pickle.loads, in a child, makes the marker appear."""
    marker.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            pickle.loads(data)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return marker.exists()


def main() -> None:
    """Measure every hostile pickle, or show that the dangerous ones are dangerous."""
    directory = Path(sys.argv[1])
    marker = directory / "marker"
    traps(directory)
    sys.path.insert(0, str(directory))
    dangerous = executing(str(marker))
    if "--unprotected" in sys.argv:
        print(json.dumps({name: runs_unprotected(data, marker) for name, data in dangerous.items()}))
    else:
        everything = dangerous | costly() | malformed()
        print(json.dumps({name: measure(data) for name, data in everything.items()}))


if __name__ == "__main__":
    main()
