"""How fast is the replay? Against plain scripts, against the machine's own matmul, and over the context's length.

    python tests/benchmarks/bench_replay.py [--json] [--rounds 5]

One process, two threads, fp32. Weights, states and tokens are seeded; so is what each walk accepts, hence every contestant
computes the same anchors. Contestants take turns within a round, and a row is the median over rounds of the ratio of
seconds in that round. The plain scripts are in replay_baselines.py:
  speedup_naive_N, speedup_cached_sequential_N   the evaluation's five walks (chain, two streaks, two trees), walked one
      after the other as a script does that knows one walk at a time, over the time in which the engine does all five
  .._same_anchors   the same with each distinct anchor computed once by the script, too: what is left without shared walks
A script is timed on a few requests and counted per anchor; the engine is timed on all, its contexts included.
matmul_peak_fraction_large: arithmetic that no program could leave out (context once a request, block rows through the
layers, head) per second, over the best of torch.matmul on large squares in the same round.
With --json the last line of stdout is {"name", "machine", "versions", "results"}.
"""

from __future__ import annotations

import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from replay_baselines import PlainDrafter, Replayer, Request, cached, naive
from reporting import Row, arguments, report, row
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dflash_model.ddtree import ddtree_matched
from dflash_model.drafter.backbone import Drafter
from dflash_model.drafter.geometry import Geometry
from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.spec import DrafterSpec, MaskPolicy, Rope
from dflash_model.replay.engine import Sample, replay
from dflash_model.replay.records import SampleRecords
from dflash_model.replay.records import Sequence as Lengths
from dflash_model.replay.walk import Matcher, chain_matched, streak_matched

THREADS = 2
WALKS: dict[str, tuple[Matcher, float]] = {
    "chain": (chain_matched, 0.88),
    "top-4 streak": (partial(streak_matched, width=4), 0.96),
    "top-8 streak": (partial(streak_matched, width=8), 0.97),
    "DDTree-16": (partial(ddtree_matched, budget=16), 0.92),
    "DDTree-64": (partial(ddtree_matched, budget=64), 0.945),
}
"""The evaluation's walks, and how often each is made to accept a slot: about what the demo's reference drafter does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """A drafter's size and its target's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    taps: int
    block: int
    vocabulary: int

    @property
    def spec(self) -> DrafterSpec:
        """Full attention, z-lab's slot layout."""
        return DrafterSpec(
            family="dflash", source_format="zlab", tap_indices=tuple(range(1, self.taps + 1)), block_size=self.block, shift=0,
            mask_token_id=3, hidden_size=self.hidden, intermediate_size=self.intermediate, num_layers=self.layers,
            num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim, rms_norm_eps=1e-6, attention_bias=False,
            vocab_size=self.vocabulary, num_target_layers=self.taps + 1, rope=Rope(theta=1e4, dims=self.head_dim),
            layer_masks=(MaskPolicy(in_block="bidirectional"),) * self.layers,
        )  # fmt: skip

    @property
    def geometry(self) -> Geometry:
        """Of `spec`."""
        return Geometry(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_layers=self.layers, num_heads=self.heads,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, num_taps=self.taps, attention_bias=False,
        )  # fmt: skip

    def flops(self, requests: Sequence[Lengths], anchors: Sequence[Sequence[int]]) -> float:
        """Arithmetic that cannot be left out: 2 per multiply-add of every linear map and of attention over visible keys."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        context_row = self.taps * self.hidden**2 + self.layers * 2 * self.hidden * kv
        block_row = self.layers * (2 * self.hidden * q + 2 * self.hidden * kv + 3 * self.hidden * self.intermediate)
        total = 0.0
        for request, visited in zip(requests, anchors, strict=True):
            total += context_row * (request.end - 1)
            for anchor in visited:
                total += self.block * (block_row + self.layers * 2 * q * (anchor + self.block))
                total += (self.block - 1) * self.hidden * self.vocabulary
        return 2 * total


DEMO = Size(hidden=96, layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=256, taps=3, block=8, vocabulary=512)
LARGE = Size(hidden=2048, layers=5, heads=16, kv_heads=8, head_dim=128, intermediate=6144, taps=5, block=16, vocabulary=32768)


class Workload:
    """One drafter, some requests of one context length, and the anchors that every walk visits."""

    def __init__(
        self, size: Size, directory: Path, *, context: int, completion: int, requests: int, walks: Sequence[str]
    ) -> None:
        """Seeded; the weights lie in a file in `directory`, made once a size."""
        self.size, self.walks = size, tuple(walks)
        path = directory / f"{size.hidden}.safetensors"
        if not path.exists():
            save_file(_weights(size), path)
        self.drafter: Drafter = load_drafter(path, size.spec)
        rng = torch.Generator().manual_seed(7)
        self.embedding = torch.randn(size.vocabulary, size.hidden, generator=rng)
        self.head = torch.randn(size.vocabulary, size.hidden, generator=rng) / size.hidden**0.5
        self.plain = PlainDrafter(size.spec, dict(self.drafter.state_dict()), embedding=self.embedding, head=self.head)
        self.lengths = [
            Lengths(sample_id=str(i), prompt_length=context, completion_length=completion, overshoot_length=0, stopped=False)
            for i in range(requests)
        ]
        self.requests = [
            Request(
                token_ids=torch.randint(4, size.vocabulary, (context + completion,), generator=rng),
                states=torch.randn(context + completion, size.taps * size.hidden, generator=rng),
            )
            for _ in range(requests)
        ]
        luck = np.random.default_rng(11).random((requests, completion, size.block - 1))
        self.matched = {name: np.logical_and.accumulate(luck < WALKS[name][1], axis=-1).sum(axis=-1) for name in self.walks}

    def visited(self, request: int, walk: str) -> list[int]:
        """The anchors of one walk."""
        lengths, matched = self.lengths[request], self.matched[walk][request]
        anchors, anchor = [], lengths.prompt_length
        while anchor < lengths.end - 1:
            anchors.append(anchor)
            anchor += int(matched[anchor - lengths.prompt_length]) + 1
        return anchors

    def distinct(self, request: int) -> list[int]:
        """The anchors of all walks, each once."""
        return sorted({anchor for walk in self.walks for anchor in self.visited(request, walk)})

    def engine(self) -> list[SampleRecords]:
        """All walks of all requests."""
        samples = [
            Sample(sequence=lengths, token_ids=request.token_ids.tolist(), load_states=partial(_same, request.states))
            for lengths, request in zip(self.lengths, self.requests, strict=True)
        ]
        matchers = [partial(self._pinned, name) for name in self.walks]
        return list(replay(self.drafter, samples, embedding=self.embedding, head=self.head, walks=matchers, top_k=64))

    def _pinned(self, walk: str, records: SampleRecords, row: int) -> int:
        """Do the matcher's work, then accept what is pinned."""
        WALKS[walk][0](records, row)
        lengths = records.sequence
        return int(self.matched[walk][int(lengths.sample_id)][int(records.anchors[row]) - lengths.prompt_length])

    def plain_seconds(self, replayer: Replayer, requests: Sequence[int]) -> float:
        """Seconds that a plain script takes for one anchor, over every walk of some requests."""
        count, started = 0, time.perf_counter()
        for request in requests:
            for walk in self.walks:
                anchors = self.visited(request, walk)
                replayer(self.plain, self.requests[request], anchors)
                count += len(anchors)
        return (time.perf_counter() - started) / count

    @property
    def visits(self) -> int:
        """Anchors over all walks and requests, those that walks share counted for each."""
        return sum(len(self.visited(request, walk)) for request in range(len(self.requests)) for walk in self.walks)

    @property
    def anchors(self) -> list[list[int]]:
        """Distinct anchors of each request."""
        return [self.distinct(request) for request in range(len(self.requests))]


def _same(states: torch.Tensor) -> torch.Tensor:
    return states


def _weights(size: Size) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return {
        name: torch.ones(shape) if "norm" in name else torch.randn(shape, generator=rng) / shape[-1] ** 0.5
        for name, shape in size.geometry.tensor_shapes().items()
    }


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def speedups(work: Workload, replayer: Replayer, *, rounds: int, plain_requests: Sequence[int]) -> tuple[float, float]:
    """(over a script that walks every walk, over a script that shares anchors): medians over rounds."""
    _check_pinned(work)
    distinct = sum(map(len, work.anchors))
    walked, shared = [], []
    for _ in range(rounds):
        plain, engine = work.plain_seconds(replayer, plain_requests), seconds(work.engine)
        walked.append(plain * work.visits / engine)
        shared.append(plain * distinct / engine)
    return statistics.median(walked), statistics.median(shared)


def _check_pinned(work: Workload) -> None:
    """Everybody computes the same anchors; also warms caches."""
    found = {int(records.sequence.sample_id): records.anchors.tolist() for records in work.engine()}
    assert [found[request] for request in sorted(found)] == work.anchors


def demo_rows(directory: Path, rounds: int) -> list[Row]:
    """Demo-size rows: speedups at two contexts, then anchors per second over the context's length."""
    rows = []
    for context, replayer, name, bar in (
        (512, naive, "speedup_naive_512", 10),
        (2048, naive, "speedup_naive_2048", 20),
        (2048, cached, "speedup_cached_sequential_2048", 4),
    ):
        work = Workload(DEMO, directory, context=context, completion=128, requests=24, walks=list(WALKS))
        walked, shared = speedups(work, replayer, rounds=rounds, plain_requests=range(1 if replayer is naive else 2))
        rows += [row(name, walked, "x", least=bar, digits=2), row(f"{name}_same_anchors", shared, "x", digits=2)]
        print(f"{name}: {walked:.2f}, same anchors {shared:.2f}, {work.visits} visits", file=sys.stderr)
    return rows + growth_rows(directory, rounds)


def growth_rows(directory: Path, rounds: int) -> list[Row]:
    """Anchors per second at five contexts, taken in turn, and the exponent of seconds per anchor over the context."""
    contexts = (256, 512, 1024, 2048, 4096)
    works = {n: Workload(DEMO, directory, context=n, completion=128, requests=16, walks=list(WALKS)) for n in contexts}
    taken: dict[int, list[float]] = {n: [] for n in contexts}
    for turn in range(rounds + 1):
        for context, work in works.items():
            spent = seconds(work.engine)
            if turn:
                taken[context].append(spent / sum(map(len, work.anchors)))
    per_anchor = {n: statistics.median(values) for n, values in taken.items()}
    exponent = float(np.polyfit(np.log(contexts), np.log([per_anchor[n] for n in contexts]), 1)[0])
    rows = [row(f"anchors_per_s_{n}", 1 / spent, "1/s", digits=1) for n, spent in per_anchor.items()]
    return [*rows, row("growth_exponent", exponent, "", most=1.1)]


def large_rows(directory: Path, rounds: int) -> list[Row]:
    """A drafter of real size: against the cached script, and against the machine's own matmul."""
    work = Workload(LARGE, directory, context=1024, completion=96, requests=4, walks=["chain", "DDTree-64"])
    _check_pinned(work)
    useful, distinct = work.size.flops(work.lengths, work.anchors), sum(map(len, work.anchors))
    square = torch.randn(2048, 2048)
    walked, shared, fractions = [], [], []
    for _ in range(rounds):
        engine = seconds(work.engine)
        peak = max(2 * 2048**3 / seconds(lambda: square @ square) for _ in range(8))
        plain = work.plain_seconds(cached, range(1))
        fractions.append(useful / engine / peak)
        walked.append(plain * work.visits / engine)
        shared.append(plain * distinct / engine)
        print(
            f"large: engine {engine:.1f} s, {distinct} anchors, peak {peak / 1e9:.0f} GFLOP/s, {fractions[-1]:.2f}",
            file=sys.stderr,
        )
    return [
        row("speedup_cached_sequential_large", statistics.median(walked), "x", least=3, digits=2),
        row("speedup_cached_sequential_large_same_anchors", statistics.median(shared), "x", digits=2),
        row("matmul_peak_fraction_large", statistics.median(fractions), "share", least=0.75),
    ]


def peak_rss_mib() -> float:
    """Of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of every contestant")
    parser.add_argument("--part", choices=("all", "demo", "large"), default="all", help="which sizes")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        if options.part != "large":
            rows += demo_rows(Path(temporary), options.rounds)
            rows.append(row("peak_rss_demo_size", peak_rss_mib(), "MiB", digits=0))
        if options.part != "demo":
            rows += large_rows(Path(temporary), max(3, options.rounds // 2))
            rows.append(row("peak_rss_large", peak_rss_mib(), "MiB", digits=0))
    report("replay", rows, packages=("torch", "numpy"), as_json=options.json)


if __name__ == "__main__":
    main()
