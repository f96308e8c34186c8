"""Reads tests/data/golden (what the public implementations computed), and drafts with this program on the same inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_model.drafter.backbone import Drafter, Group
from dflash_model.drafter.spec import DrafterSpec

GOLDEN = Path(__file__).parent / "data" / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.json"))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Vector:
    """One drafter of a public implementation, its inputs and what it gave."""

    spec: DrafterSpec
    config: dict[str, Any]
    weights: dict[str, Tensor]
    states: Tensor
    embedding: Tensor
    head: Tensor
    anchors: tuple[int, ...]
    anchor_ids: Tensor
    hidden: Tensor
    logits: Tensor
    tokens: Tensor


def read_vector(name: str) -> Vector:
    facts = json.loads((GOLDEN / f"{name}.json").read_text())
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    given = {key.removeprefix("inputs."): value for key, value in tensors.items() if key.startswith("inputs.")}
    anchors = tuple(facts["anchors"])
    return Vector(
        spec=DrafterSpec.from_json(facts["spec"]),
        config=facts["config"],
        weights={key.removeprefix("drafter."): value for key, value in tensors.items() if key.startswith("drafter.")},
        states=given["states"].float(),
        embedding=given["embedding"].float(),
        head=given["head"].float(),
        anchors=anchors,
        anchor_ids=given["token_ids"][list(anchors)],
        hidden=tensors["outputs.hidden"],
        logits=tensors["outputs.logits"],
        tokens=tensors["outputs.tokens"],
    )


def in_memory(vector: Vector) -> Drafter:
    """The vector's drafter in fp32."""
    with torch.device("meta"):
        drafter = Drafter(vector.spec)
    weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in vector.weights.items()}
    drafter.load_state_dict(weights, strict=True, assign=True)
    return drafter.requires_grad_(False).eval()


def run(vector: Vector, drafter: Drafter | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [A, D, H], logits [A, D, C] and drafted tokens [A, D], all anchors in one forward."""
    drafter = drafter or in_memory(vector)
    tables = drafter.tables(vector.embedding, vector.head)
    context = drafter.make_context(vector.states)
    hidden = drafter(tables.blocks(vector.anchor_ids), [Group(context=context, anchors=vector.anchors)])
    logits = tables.logits(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
    return hidden, logits, drafter.propose(hidden, vector.anchor_ids, tables)


Mistake = Callable[[Vector], Vector]


def with_spec(**changes: Any) -> Mistake:
    return lambda vector: replace(vector, spec=replace(vector.spec, **changes))


def with_rope(**changes: Any) -> Mistake:
    return lambda vector: replace(vector, spec=replace(vector.spec, rope=replace(vector.spec.rope, **changes)))


def with_masks(**changes: Any) -> Mistake:
    """Every layer's policy changed."""
    return lambda vector: replace(
        vector, spec=replace(vector.spec, layer_masks=tuple(replace(policy, **changes) for policy in vector.spec.layer_masks))
    )


def with_windows(change: int) -> Mistake:
    """Every window wider or narrower by `change`."""
    return lambda vector: replace(
        vector,
        spec=replace(
            vector.spec,
            layer_masks=tuple(
                policy if policy.window is None else replace(policy, window=policy.window + change)
                for policy in vector.spec.layer_masks
            ),
        ),
    )


def with_weights(part: str, change: Callable[[Tensor], Tensor]) -> Mistake:
    """`change` on every tensor whose name contains `part`."""
    return lambda vector: replace(
        vector, weights={name: change(tensor) if part in name else tensor for name, tensor in vector.weights.items()}
    )


def without(*names: str, **changes: Any) -> Mistake:
    """The target's table in place of the drafter's own."""
    return lambda vector: replace(
        vector,
        spec=replace(vector.spec, **changes),
        weights={name: tensor for name, tensor in vector.weights.items() if name not in names},
    )


def renamed(pairs: dict[str, str]) -> Mistake:
    """Tensors exchanged: each part of a name becomes its partner."""

    def swapped(name: str) -> str:
        for left, right in pairs.items():
            if left in name:
                return name.replace(left, right)
            if right in name:
                return name.replace(right, left)
        return name

    return lambda vector: replace(vector, weights={swapped(name): tensor for name, tensor in vector.weights.items()})
