"""Plain data as JSON: bounded, and without what JSON cannot say."""

import collections
import datetime
import json
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest

from dflash_model.checkpoint.plain import MAX_TEXT, MAX_VALUES, render_plain
from dflash_model.checkpoint.symbolic import load_symbolic
from dflash_model.digests import canonical_json


def plain_of(value: Any, protocol: int = 2) -> Any:
    rendered = render_plain(load_symbolic(pickle.dumps(value, protocol), what="x"))
    canonical_json(rendered)  # whatever comes out can be written
    return rendered


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None), (True, True), (7, 7), (-0.5, -0.5), ("a", "a"), ([1, (2, 3)], [1, [2, 3]]), ({}, {}), ([], []),
        (float("nan"), "nan"), (float("-inf"), "-inf"), (b"ab", {"__type__": "bytes", "size": 2}),
        ({1: "a", None: "b", False: "c"}, {"1": "a", "None": "b", "False": "c"}), ({(1, "x"): 2}, {"1/x": 2}),
        (np.float32(0.1), float(np.float32(0.1))), (np.int8(-3), -3), (np.bool_(True), True), (np.float64("inf"), "inf"),
        (np.uint64(2**63), 2**63), (np.float16(0.5), 0.5), (np.array([1.5], ">f8")[0], 1.5),
        (pathlib.PurePosixPath("/a/b"), "/a/b"), (pathlib.PurePosixPath("a"), "a"), (pathlib.PurePosixPath("."), "."),
        (pathlib.PureWindowsPath("a/b"), "a/b"), (collections.Counter("aab"), {"a": 2, "b": 1}), (1 + 2j, {"__type__": "complex", "value": "(1+2j)"}),
        (len, {"__type__": "name", "name": "builtins.len"}), ("\udc80", "\\udc80"),
    ],
)  # fmt: skip
def test_values(protocol: int, value: object, plain: object) -> None:
    assert plain_of(value, protocol) == plain


def test_objects_keep_their_class_and_what_they_were_made_from() -> None:
    date = plain_of(datetime.date(2026, 11, 2))
    assert date["__type__"] == "datetime.date"
    assert plain_of(np.dtype("f4"))["__type__"] == "numpy.dtype"
    assert plain_of({"when": datetime.timedelta(1, 2)}) == {"when": {"__type__": "datetime.timedelta", "args": [1, 2, 0]}}


def test_long_texts_are_cut_and_say_so() -> None:
    found = plain_of("x" * (MAX_TEXT + 5))
    assert len(found) < MAX_TEXT + 50
    assert found.endswith(f"({MAX_TEXT + 5} characters)")


def test_long_lists_are_cut_and_say_so() -> None:
    found = plain_of({"losses": [0.5] * (MAX_VALUES + 10), "after": 1})
    assert len(found["losses"]) < MAX_VALUES + 10
    assert found["losses"][-1] == {"__type__": "omitted: too large"}


def test_deep_and_unfolding_values_stay_small() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    unfolding: list[Any] = [0]
    for _ in range(25):
        unfolding = [unfolding] * 10
    for value in (ring, unfolding):
        assert len(json.dumps(plain_of(value))) < 10_000_000
