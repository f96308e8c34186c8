"""Loops: a repeated cycle is flagged from the stated length on, and nothing else is."""

from __future__ import annotations

import random

import pytest

from dflash_model.loops import MIN_TOKENS, MIN_TURNS, looping_tokens


def naive(tokens: list[int]) -> int:
    """Every stretch and every cycle, one by one."""
    longest = 0
    for start in range(len(tokens)):
        for end in range(start + MIN_TOKENS, len(tokens) + 1):
            part = tokens[start:end]
            for cycle in range(1, len(part) // MIN_TURNS + 1):
                if all(part[i] == part[i - cycle] for i in range(cycle, len(part))):
                    longest = max(longest, len(part))
    return longest


@pytest.mark.parametrize("cycle", [1, 3, 12, 13])
def test_a_cycle_counts_from_four_turns_and_48_tokens_on(cycle: int) -> None:
    turns = [7000 + i % cycle for i in range(200)]
    needed = max(48, 4 * cycle)
    head, tail = list(range(100, 120)), list(range(200, 220))
    assert looping_tokens([*head, *turns[:needed], *tail]) == needed
    assert looping_tokens([*head, *turns[: needed - 1], *tail]) == 0


def test_one_other_token_breaks_a_loop() -> None:
    loop = [5, 6] * 40
    assert looping_tokens(loop) == 80
    loop[40] = 9
    assert looping_tokens(loop) == 0


def test_short_and_empty_completions_do_not_loop() -> None:
    assert looping_tokens([]) == looping_tokens([1]) == looping_tokens([1] * 47) == 0


def test_random_sequences_agree_with_a_naive_search() -> None:
    chance = random.Random(0)
    seen = set()
    for _ in range(12):
        cycle = [chance.randrange(3) for _ in range(chance.choice([2, 9, 13]))]
        tokens = [chance.randrange(9) for _ in range(6)] + (cycle * 9)[: chance.choice([44, 48, 52, 60])] + [8, 8, 7]
        seen.add(looping_tokens(tokens) > 0)
        assert looping_tokens(tokens) == naive(tokens)
    assert seen == {True, False}
