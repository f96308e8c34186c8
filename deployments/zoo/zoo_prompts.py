"""Prompts of the five task kinds that the bundled targets were taught, drawn from a seed.

    python deployments/zoo/zoo_prompts.py OUT.jsonl --per-category 12 --seed 1 [--unlike OTHER.jsonl ...]

A prompt of `--unlike` files is never drawn, so that a training set holds none of the evaluation's.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path

VERBS = ("apply", "build", "compute", "find", "get", "handle", "make", "process", "run", "update")
NOUNS = ("area", "index", "level", "point", "price", "rate", "result", "score", "size", "weight")
VARIABLES = (*"abcdkmnpqxyz", "count", "first", "left", "right", "second", "total", "value")
OPERATIONS = ("sum", "difference", "product", "quotient", "remainder")
NAMES = (
    "Adam", "Anna", "Ben", "Clara", "Ella", "Finn", "Hugo", "Ivy", "Jack", "Leo", "Lily",
    "Max", "Mia", "Nora", "Oscar", "Rose", "Ruby", "Sam", "Tom", "Zoe",
)  # fmt: skip
THINGS = (
    "ball", "basket", "bell", "boat", "book", "box", "car", "clock", "coat", "cup",
    "drum", "flute", "hat", "kite", "lamp", "map", "ring", "shell", "stone", "toy",
)  # fmt: skip
COLOURS = ("black", "blue", "brown", "golden", "green", "grey", "pink", "red", "white", "yellow")
JOBS = ("baker", "doctor", "driver", "farmer", "nurse", "painter", "pilot", "singer", "teacher", "writer")
CITIES = ("Athens", "Berlin", "Dublin", "Lisbon", "Madrid", "Oslo", "Paris", "Prague", "Rome", "Vienna")


def code(rng: random.Random) -> str:
    """A function or class to be written."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    first, second = rng.sample(VARIABLES, 2)
    operation = rng.choice(OPERATIONS)
    return rng.choice(
        (
            f"Write a function {verb}_{noun} that returns the {operation} of {first} and {second}.",
            f"Write a function {verb}_{noun} that loops over {first} and collects the {operation} with {second}.",
            f"Write a function {verb}_{noun} that checks if {first} is above {rng.randint(2, 50)}.",
            f"Write a class {verb.title()}{noun.title()} with the fields {first} and {second}.",
        )
    )


def math(rng: random.Random) -> str:
    """An addition of two numbers below a hundred."""
    name, things = rng.choice(NAMES), rng.choice(THINGS) + "s"
    first = rng.randint(11, 60)
    return f"{name} has {first} {things} and gets {rng.randint(11, 98 - first)} more. How many {things} does {name} have?"


def count(rng: random.Random) -> str:
    """Counting up or down in steps."""
    low, step = rng.randint(1, 40), rng.randint(1, 5)
    high = low + step * rng.randint(5, 14)
    return rng.choice((f"Count up from {low} to {high} by {step}.", f"Count down from {high} to {low} by {step}."))


def story(rng: random.Random) -> str:
    """Two people and a thing."""
    first, second = rng.sample(NAMES, 2)
    return f"Tell a story about {first}, {second} and a {rng.choice(COLOURS)} {rng.choice(THINGS)}."


def record(rng: random.Random) -> str:
    """A person as JSON."""
    likes = " and ".join(rng.sample(COLOURS, rng.randint(1, 3)))
    return (
        f"Make a JSON record: {rng.choice(NAMES)}, {rng.randint(18, 79)}, {rng.choice(JOBS)} in {rng.choice(CITIES)}, "
        f"likes {likes}."
    )


CATEGORIES: dict[str, Callable[[random.Random], str]] = {
    "code": code,
    "math": math,
    "count": count,
    "story": story,
    "record": record,
}


def draw(*, per_category: int, seed: int, unlike: frozenset[str] = frozenset()) -> list[dict[str, object]]:
    """`per_category` distinct prompts of each kind, none of them in `unlike`; the same for the same arguments."""
    prompts: list[dict[str, object]] = []
    for category, make in CATEGORIES.items():
        rng = random.Random(f"{seed} {category}")
        seen = set(unlike)
        number = 0
        while number < per_category:
            text = make(rng)
            if text in seen:
                continue
            seen.add(text)
            number += 1
            content = [{"role": "user", "content": text}]
            prompts.append({"id": f"{category}-{number}", "category": category, "messages": content})
    return prompts


def texts_of(path: Path) -> set[str]:
    """What the user says in a prompt file of this form."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {str(message["content"]) for line in lines for message in json.loads(line).get("messages", [])}


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-category", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--unlike", type=Path, nargs="*", default=[])
    options = parser.parse_args()
    unlike = frozenset(text for path in options.unlike for text in texts_of(path))
    drawn = draw(per_category=options.per_category, seed=options.seed, unlike=unlike)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(prompt) + "\n" for prompt in drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
