"""Made-up records of drafters of a chosen quality, and the stored result of three of them that report tests read.

python -m tests.made_up_records      (after a change of result.json's form)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dflash_model.replay.records import UNKNOWN, SampleRecords, Sequence
from dflash_model.result import CANDIDATE, REFERENCE, DrafterRecords, build_result

STORED = Path(__file__).parent / "data" / "result" / "three_drafters.json"
DRAFTED, KEPT, VOCAB = 7, 64, 512
CATEGORIES = {"code": 0.25, "math": 0.1, "count": -0.5, "story": 0.45, "record": 0.0}
"""Category -> how much harder than the average its tokens are to draft."""


def made_up_records(seed: int, *, sharpness: float, late: float, prompts: int = 60) -> list[SampleRecords]:
    """A calibrated drafter: each slot's true rank is drawn from the slot's own distribution, which gets flatter with depth.

    `sharpness` sets slot 1, `late` how much flatter each later slot is.
    """
    names = list(CATEGORIES)
    lengths = np.random.default_rng(0).integers(20, 180, prompts)
    samples = []
    for index in range(prompts):
        rng = np.random.default_rng([seed, index])
        category, length = names[index % len(names)], int(lengths[index])
        difficulty = CATEGORIES[category] + 0.5 * rng.standard_normal((length, 1))
        steepness = np.maximum(sharpness - late * np.arange(DRAFTED) - difficulty, 0.6)
        scores = -steepness[:, :, None] * np.log1p(np.arange(VOCAB))
        logprobs = scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))
        ranks = (np.exp(logprobs).cumsum(axis=-1) < rng.random((length, DRAFTED, 1)) * (1 - 1e-9)).sum(axis=-1)
        samples.append(_sample(f"{category}-{index:03d}", ranks, logprobs))
    return samples


def _sample(sample_id: str, ranks: Any, logprobs: Any) -> SampleRecords:
    """Records of every anchor of one completion; the token at position p is p + 1000 for every drafter."""
    length = len(ranks)
    sequence = Sequence(sample_id=sample_id, prompt_length=10, completion_length=length, overshoot_length=DRAFTED, stopped=True)
    anchors = np.arange(10, 10 + length, dtype=np.int32)
    return SampleRecords(
        sequence=sequence,
        anchors=anchors,
        true_ids=(anchors[:, None] + np.arange(1, DRAFTED + 1) + 1000).astype(np.int32),
        true_rank=ranks.astype(np.int32),
        true_logprob=np.take_along_axis(logprobs, ranks[..., None], axis=-1)[..., 0].astype(np.float32),
        top_ids=np.zeros((length, DRAFTED, KEPT), dtype=np.int32),
        top_logprobs=logprobs[:, :, :KEPT].astype(np.float32),
        log_sum_exp=np.zeros((length, DRAFTED), dtype=np.float32),
    )


def hand_records(
    sample_id: str,
    ranks: list[list[int]],
    *,
    completion: int,
    prompt: int = 2,
    overshoot: int = 0,
    stopped: bool = True,
    logprobs: Any = None,
) -> SampleRecords:
    """Records written out by hand: row r is the anchor prompt + r, its entries the true token's rank in each slot.

    Ranks past the last known token become UNKNOWN. `logprobs` [K] or [A, D, K]: the slots' candidates, best first.
    """
    count, slots = len(ranks), len(ranks[0]) if ranks else 3
    anchors = np.arange(prompt, prompt + count, dtype=np.int32)
    positions = anchors[:, None] + np.arange(1, slots + 1)
    known = positions < prompt + completion + overshoot
    candidates = np.asarray([-0.1, -2.5, -4.0, -5.0] if logprobs is None else logprobs, dtype=np.float32)
    candidates = np.broadcast_to(candidates, (count, slots, candidates.shape[-1])).copy()
    return SampleRecords(
        sequence=Sequence(
            sample_id=sample_id, prompt_length=prompt, completion_length=completion, overshoot_length=overshoot, stopped=stopped
        ),
        anchors=anchors,
        true_ids=np.where(known, positions + 1000, UNKNOWN).astype(np.int32),
        true_rank=np.where(known, np.array(ranks, dtype=np.int32).reshape(count, slots), UNKNOWN).astype(np.int32),
        true_logprob=np.zeros((count, slots), dtype=np.float32),
        top_ids=np.zeros(candidates.shape, dtype=np.int32),
        top_logprobs=candidates,
        log_sum_exp=np.zeros((count, slots), dtype=np.float32),
    )


def made_up_spec() -> dict[str, Any]:
    """What DrafterSpec.to_json says of such a drafter, as far as a result needs it."""
    full = {"in_block": "bidirectional", "window": None, "window_origin": "query"}
    return {
        "family": "dflash",
        "source_format": "zlab",
        "block_size": DRAFTED + 1,
        "shift": 0,
        "tap_indices": [2, 5, 7],
        "mask_token_id": 3,
        "num_layers": 2,
        "layer_masks": [full, full],
        "vocab_size": VOCAB,
    }


def made_up_result(prompts: int = 60) -> dict[str, Any]:
    """Two candidates against a reference: one better in every slot, one that loses its late slots."""
    quality = {"step-000220": (6, 3.60, 0.20), "step-000165": (7, 3.45, 0.33), "release": (8, 3.40, 0.24)}
    drafters = [
        DrafterRecords(
            name=name,
            role=REFERENCE if name == "release" else CANDIDATE,
            step=None if name == "release" else int(name[5:]),
            digest=f"{seed:064x}",
            spec=made_up_spec(),
            records=made_up_records(seed, sharpness=sharpness, late=late, prompts=prompts),
            warnings=["Nothing states the attention masks <of this one>."] if name == "step-000165" else [],
        )
        for name, (seed, sharpness, late) in quality.items()
    ]
    ids = [records.sequence.sample_id for records in drafters[0].records]
    categories = {sample_id: sample_id.split("-")[0] for sample_id in ids}
    counts = {name: sum(category == name for category in categories.values()) for name in CATEGORIES}
    return build_result(
        drafters=drafters,
        categories=categories,
        prompts_facts={"count": prompts, "digest": "5e" * 32, "categories": counts, "template": "chat, thinking off"},
        target_facts={"name": "tiny-hybrid", "digest": "ab" * 32, "layers": 8, "vocab_size": VOCAB},
        fidelity={
            "verdict": "PASS",
            "reasons": [],
            "n": 5898,
            "agree": 0.9987,
            "hard_rate": 0.0,
            "max_gap_nats": 0.21,
            "mean_nll_nats": 0.31,
            "delta_median_nats": None,
        },
    )


if __name__ == "__main__":
    STORED.write_text(json.dumps(made_up_result(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"wrote {STORED}")
