"""The golden vectors' conventions again, live and with fresh weights, where PyPI dflash or speculators is importable."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dflash_model.drafter.spec import DrafterSpec
from tests.golden_vectors import Vector, run

MAKER = Path(__file__).parent / "golden" / "make_golden.py"
FRESH = 100
"""Seeds from here on made no stored vector."""


def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_golden", MAKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE: Any = maker()


def vector_of(made: dict[str, Any]) -> Vector:
    given, anchors = made["inputs"], MAKE.ANCHORS
    return Vector(
        spec=DrafterSpec.from_json(made["spec"]), config=made["config"], weights=made["weights"], states=given["states"],
        embedding=given["embedding"], head=given["head"], anchors=anchors, anchor_ids=given["token_ids"][list(anchors)],
        **made["found"],
    )  # fmt: skip


def compare(make: Any, name: str) -> None:
    made = next(made for seed in range(FRESH, FRESH + 20) if MAKE.clear(made := make(name, seed)))
    vector = vector_of(made)
    hidden, _, tokens = run(vector)
    assert float((hidden - vector.hidden).abs().max()) < 1e-5
    assert torch.equal(tokens, vector.tokens)


@pytest.mark.parity
@pytest.mark.parametrize("name", MAKE.DFLASH)
def test_pypi_dflash_drafts_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    public = pytest.importorskip("dflash.model", reason="PyPI dflash 0.1.0 is not installed")
    monkeypatch.setattr(public, "apply_rotary_pos_emb", public.apply_rotary_pos_emb)  # put back what the maker replaces
    compare(MAKE.dflash_vector, name)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MAKE.SPECULATORS)
def test_speculators_drafts_the_same(name: str) -> None:
    pytest.importorskip("speculators", reason="speculators 0.9.0 is not installed")
    compare(MAKE.speculators_vector, name)
