"""Which completions run in circles: greedy decoding falls into loops, and a loop is easy for any drafter.

A few of them lift tau without saying anything about the drafter, so they are flagged and tau is given without them, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_TOKENS = 48
MIN_TURNS = 4
RULE = (
    f"A completion loops when somewhere in it the same tokens come at least {MIN_TURNS} times in a row, "
    f"over {MIN_TOKENS} tokens or more."
)


def looping_tokens(token_ids: Sequence[int]) -> int:
    """Length of the longest stretch that repeats one cycle at least MIN_TURNS times over at least MIN_TOKENS tokens, else 0.

    A stretch of n tokens has a cycle of p where token i equals token i - p all through its last n - p tokens.
    """
    tokens = np.asarray(token_ids, dtype=np.int64)
    longest = 0
    for cycle in range(1, len(tokens) // MIN_TURNS + 1):
        stretch = _longest_run(tokens[cycle:] == tokens[:-cycle]) + cycle
        if stretch >= max(MIN_TOKENS, MIN_TURNS * cycle):
            longest = max(longest, stretch)
    return longest


def _longest_run(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max(initial=0))
