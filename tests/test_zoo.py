"""The zoo: its table and the drafters in the repository agree, and every one is read by the readers of any checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from zoo_entries import DRAFTERS, HERE, NOTES_NAME, PROMPTS, Entry, entries, read_table
from zoo_prompts import CATEGORIES, draw, texts_of

from dflash_model.drafter.loading import load_drafter
from dflash_model.drafter.zlab import spec_from_zlab
from dflash_model.training.faults import FAULTS
from tests.tiny_drafters import shapes_in

TABLE = read_table()
RUNS = list(entries(TABLE))
THERE = sorted(path.name for path in DRAFTERS.iterdir())


def owner(name: str) -> Entry:
    (entry,) = [entry for entry in RUNS if name in dict(entry.drafters())]
    return entry


def test_there_is_an_entry_for_every_known_fault_with_two_seeds() -> None:
    faults = [entry.config.fault for entry in RUNS if entry.config.fault]
    assert sorted(faults) == sorted([*FAULTS, *FAULTS])
    assert len({entry.name for entry in RUNS}) == len(RUNS)


def test_a_change_laid_over_the_base_leaves_the_rest(tmp_path: Path) -> None:
    by_name = {entry.name: entry for entry in entries(TABLE, build=tmp_path)}
    plain, sliding = by_name["healthy"], by_name["sliding-causal"]
    assert sliding.config.drafter.sliding_window == 32
    assert sliding.config.drafter.mask_token_id == plain.config.drafter.mask_token_id == 3
    assert plain.config.drafter.sliding_window is None
    assert by_name["healthy-seed1"].config.seed == 1
    assert by_name["healthy-seed1"].digest() != plain.digest()
    assert by_name["hybrid"].config.drafter.target_layer_ids == (1, 4, 6)


@pytest.mark.parametrize("name", THERE)
def test_every_drafter_was_made_by_the_table_as_it_stands_and_can_be_loaded(name: str) -> None:
    directory = DRAFTERS / name
    notes = json.loads((directory / NOTES_NAME).read_text())
    entry = owner(name)
    assert notes["digest"] == entry.digest(), "run make zoo"
    assert (notes["step"], notes["what"]) == (dict(entry.drafters())[name], entry.what)
    weights = directory / "model.safetensors"
    spec = spec_from_zlab(json.loads((directory / "config.json").read_text()), shapes_in(weights))
    assert spec.block_size == entry.config.drafter.block_size
    load_drafter(weights, spec)


def test_the_weights_are_small_and_the_page_names_them_all() -> None:
    assert sum(path.stat().st_size for path in DRAFTERS.rglob("*") if path.is_file()) <= 12e6
    page = (HERE / "README.md").read_text()
    assert [name for name in THERE if f"| {name} |" not in page] == []
    missing = [name for entry in RUNS for name, _ in entry.drafters() if name not in THERE]
    assert all(name in page.rpartition("not trained yet:")[2] for name in missing)


def test_prompts_are_the_same_for_a_seed_and_training_never_sees_the_held_out_ones() -> None:
    held_out = texts_of(PROMPTS)
    assert draw(per_category=3, seed=1) == draw(per_category=3, seed=1) != draw(per_category=3, seed=2)
    drawn = draw(per_category=240, seed=2, unlike=frozenset(held_out))
    texts = [prompt["messages"][0]["content"] for prompt in drawn]  # type: ignore[index]
    assert len(set(texts)) == len(texts) == 240 * len(CATEGORIES)
    assert not held_out & set(texts)
    demo = texts_of(HERE.parent / "demo" / "prompts.jsonl")
    assert not held_out & demo
