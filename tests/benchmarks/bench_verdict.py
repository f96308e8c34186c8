"""Do the intervals hold what they say, and how often is a verdict false? Simulated requests, one core, a few minutes.

    python tests/benchmarks/bench_verdict.py [--json] [--simulations 2000]

Every population is a large finite one, so the truth is exact; a simulation draws n prompts from it with replacement.
With --json the last line of stdout is {"name", "machine", "versions", "results"}.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from reporting import Row, arguments, report, row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash_model.comparison import Rules, compare
from dflash_model.intervals import Ratio, estimate, estimate_mean
from dflash_model.metrics import RequestRow
from dflash_model.verdict import BETTER, EQUAL, WORSE

Float64 = npt.NDArray[np.float64]
POPULATION = 20_000
RESAMPLES = 999
SIZES = (20, 50, 200)
REALISTIC = ("chat", "looping", "long", "short", "heavy_ratio", "one_category")
"""chat: log-normal lengths. looping: a fifth never stop and draft well. long: Pareto lengths (exponent 1.3). short: 2 to 24
tokens. heavy_ratio: candidate / reference scatters like t with 3 degrees. one_category: one of five falls by a quarter."""
RARE = "rare"
"""One prompt in ten is 30% worse, the others hardly differ: a small sample may hold not one of them."""


def population(name: str, rng: np.random.Generator, *, shift: float = 0.0, candidates: int = 1) -> Float64:
    """[P, 2 + candidates] tokens, steps under the reference, steps under each candidate. `shift`: log of their advantage."""
    size = POPULATION
    block = 16
    tokens = np.exp(np.log(250) + 0.8 * rng.standard_normal(size))
    category = rng.integers(0, 5, size)
    tau = np.array([3.0, 4.0, 4.5, 5.2, 6.0])[category] * np.exp(0.15 * rng.standard_normal(size))
    ratio = 0.06 * rng.standard_normal((candidates, size))
    if name == "looping":
        loops = rng.random(size) < 0.2
        tokens = np.where(loops, 2047, np.exp(np.log(100) + 0.5 * rng.standard_normal(size)))
        tau, block = np.where(loops, 7.6, rng.uniform(2, 6.5, size)), 8
        ratio *= np.where(loops, 0.2, 1.3)
    elif name == "long":
        tokens, tau = 40 * (1 + rng.pareto(1.3, size)), rng.uniform(2.5, 6, size)
    elif name == "short":
        tokens, tau, block = rng.integers(2, 25, size).astype(float), rng.uniform(1.5, 5, size), 8
    elif name == "heavy_ratio":
        ratio = np.clip(0.05 * rng.standard_t(3, (candidates, size)), -0.6, 0.6)
    elif name == "one_category":
        ratio += np.where(category == 2, -0.25, 0.05)
    elif name == RARE:
        ratio = 0.5 * ratio + np.where(rng.random(size) < 0.1, -0.35, 0.0)
    tokens = np.clip(np.round(tokens), 2 if name == "short" else 8, 8191)
    drafters = [tau, *(tau * np.exp(one + shift) for one in ratio)]
    return np.stack([tokens, *(_steps(rng, tokens, np.clip(one, 1.05, 0.97 * block), block) for one in drafters)], axis=1)


def _steps(rng: np.random.Generator, tokens: Float64, tau: Float64, block: int) -> Float64:
    """Steps of a request: tokens / tau with the scatter of its own steps (coefficient of variation 0.6)."""
    mean = tokens / tau
    steps = np.round(mean + 0.6 * np.sqrt(mean) * rng.standard_normal(len(tokens)))
    return np.clip(steps, np.ceil(tokens / block), tokens)


def coverage(name: str, prompts: int, simulations: int) -> dict[str, float]:
    """Share of simulations whose 95% interval holds the truth, per statistic."""
    rng = np.random.default_rng(1)
    people = population(name, rng)
    totals = people.sum(axis=0)
    taus = people[:, :1] / people[:, 1:]
    truth = {
        "difference": totals[0] / totals[2] - totals[0] / totals[1],
        "tau": totals[0] / totals[2],
        "per_request_difference": float((taus[:, 1] - taus[:, 0]).mean()),
        "per_request": float(taus[:, 1].mean()),
    }
    held = dict.fromkeys(truth, 0)
    for _ in range(simulations):
        drawn = rng.integers(0, len(people), prompts)
        tokens, theirs, ours = people[drawn].T
        candidate, reference = Ratio(numerator=tokens, denominator=ours), Ratio(numerator=tokens, denominator=theirs)
        found = {
            "difference": estimate(candidate, reference, resamples=RESAMPLES),
            "tau": estimate(candidate, resamples=RESAMPLES),
            "per_request_difference": estimate_mean(taus[drawn, 1] - taus[drawn, 0]),
            "per_request": estimate_mean(taus[drawn, 1]),
        }
        for statistic, value in found.items():
            low, high = value.interval()
            held[statistic] += int(low <= truth[statistic] <= high)
    return {statistic: count / simulations for statistic, count in held.items()}


def rows_of(people: Float64, drafter: int) -> list[RequestRow]:
    """Rows with the right number of steps and tokens; which step earned how much does not matter here."""
    rows = []
    for index, (tokens, *steps) in enumerate(people.astype(int).tolist()):
        count = steps[drafter]
        earned = (tokens - count + 1,) + (1,) * (count - 1)
        rows.append(RequestRow(sample_id=str(index), category=None, anchors=(0,) * count, step_tokens=earned))
    return rows


def verdicts(people: Float64, prompts: int, simulations: int, *, rules: Rules) -> Iterator[list[str]]:
    """The words given in each simulated comparison, one a candidate."""
    rng = np.random.default_rng(2)
    reference, *candidates = [rows_of(people, drafter) for drafter in range(people.shape[1] - 1)]
    for _ in range(simulations):
        drawn = rng.integers(0, len(people), prompts)
        named = {str(number): [rows[i] for i in drawn] for number, rows in enumerate(candidates)}
        compared = compare(named, [reference[i] for i in drawn], reference_name="reference", rules=rules)
        yield [one.verdict.word for one in compared.values()]


def without_difference(people: Float64) -> Float64:
    """The same requests with every drafter in every role, so that no drafter differs from another."""
    steps = people[:, 1:]
    return np.concatenate([np.column_stack([people[:, 0], np.roll(steps, turn, axis=1)]) for turn in range(steps.shape[1])])


def share(found: Iterator[list[str]], *words: str) -> float:
    """How often at least one candidate of a comparison was given one of `words`."""
    hits = [any(word in words for word in given) for given in found]
    return sum(hits) / len(hits)


def false_verdicts(prompts: int, simulations: int) -> dict[str, list[float]]:
    """How often each kind of falsehood is told, one share a population."""
    rng = np.random.default_rng(3)
    rules = Rules(resamples=RESAMPLES)
    rates: dict[str, list[float]] = {"difference_of_1": [], "difference_of_3": [], "equality": [], "direction": []}
    for name in ("chat", "looping", "long", "heavy_ratio"):
        for candidates in (1, 3):
            people = without_difference(population(name, rng, candidates=candidates))
            called = share(verdicts(people, prompts, simulations, rules=rules), BETTER, WORSE)
            rates[f"difference_of_{candidates}"].append(called)
        people = population(name, rng, shift=0.03)
        totals = people.sum(axis=0)
        at_margin = Rules(resamples=RESAMPLES, equal_within=float(totals[1] / totals[2] - 1))
        given = list(verdicts(people, prompts, simulations, rules=at_margin))
        rates["equality"].append(share(iter(given), EQUAL))
        rates["direction"].append(share(iter(given), WORSE))
    return rates


def power(prompts: int, simulations: int) -> float:
    """How often a candidate that is 5% better on `chat` is called better."""
    rng = np.random.default_rng(4)
    wanted, shift = 0.05, 0.05
    for _ in range(5):
        totals = population("chat", np.random.default_rng(4), shift=shift).sum(axis=0)
        shift += wanted - (totals[1] / totals[2] - 1)
    people = population("chat", rng, shift=shift)
    return share(verdicts(people, prompts, simulations, rules=Rules(resamples=RESAMPLES)), BETTER)


def share_row(what: str, value: float, *, most: float | None = None, least: float | None = None) -> Row:
    """One row that is a share of all simulations."""
    return row(what, value, "share", most=most, least=least, digits=4)


def measure(simulations: int) -> list[Row]:
    """All rows; progress goes to stderr."""
    covered: dict[int, list[float]] = {}
    for prompts in (10, *SIZES):
        for name in (*REALISTIC, RARE):
            found = coverage(name, prompts, simulations)
            print(f"n={prompts} {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items()), file=sys.stderr)
            if name == RARE:
                covered.setdefault(-prompts, []).append(found["difference"])
            else:
                covered.setdefault(prompts, []).extend(found.values())
                covered.setdefault(1000 + prompts, []).append(found["difference"])
    values = [value for prompts in SIZES for value in covered[prompts]]
    rows = [
        share_row("coverage_min", min(values), least=0.93),
        share_row("coverage_max", max(values), most=0.97),
        share_row("coverage_n10", min(covered[1010])),
        share_row("coverage_n10_all_statistics", min(covered[10])),
    ]
    rows += [share_row(f"coverage_rare_n{prompts}", covered[-prompts][0]) for prompts in SIZES]
    told: dict[str, list[float]] = {}
    for prompts in SIZES:
        for kind, rates in false_verdicts(prompts, simulations // 4).items():
            print(f"n={prompts} false {kind}: " + ", ".join(f"{rate:.3f}" for rate in rates), file=sys.stderr)
            told.setdefault(kind, []).extend(rates)
    means = {kind: sum(rates) / len(rates) for kind, rates in told.items()}
    rows.append(share_row("false_verdicts", max(means.values()), most=0.05))
    rows += [share_row(f"false_{kind}", rate) for kind, rate in means.items()]
    rows.append(share_row("false_verdicts_worst_cell", max(max(rates) for rates in told.values())))
    rows += [share_row(f"power_5_percent_n{prompts}", power(prompts, simulations // 4)) for prompts in (20, 50, 100, 200)]
    return rows


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--simulations", type=int, default=2000)
    options = parser.parse_args()
    started = time.perf_counter()
    rows = measure(options.simulations)
    rows.append(row("wall_time", time.perf_counter() - started, "s"))
    report("verdict", rows, packages=("numpy", "scipy"), as_json=options.json)


if __name__ == "__main__":
    main()
