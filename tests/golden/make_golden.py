"""Makes the golden vectors: what PyPI `dflash` 0.1.0 and `speculators` 0.9.0 compute on seeded tiny drafters.

Run it once in an environment of each library (they want different transformers), from the repository's root:

    python tests/golden/make_golden.py dflash tests/data/golden
    python tests/golden/make_golden.py speculators tests/data/golden

Environments, for Python 3.11, each beside torch 2.13.0 (CPU): `pip install --no-deps dflash==0.1.0 transformers==5.15.0`
with `huggingface-hub<2` and `tokenizers==0.22.2`; `pip install speculators==0.9.0`, then `pip uninstall torchvision
torchaudio`, which do not match. Nothing of this project is imported. The same versions write the same bytes.

A vector is NAME.json (the library's own config, and the convention in the project's neutral terms, stated by hand here)
and NAME.safetensors (weights and inputs in bf16, which is exact; hidden states, logits and drafted tokens in fp32).
PyPI dflash rotates whole heads only; the vectors of partial, multi-section and interleaved rotation put transformers'
own rotary of a model that has it into the same drafter.

Shapes: A anchors, D drafted tokens, S block rows, H hidden, N context positions, T taps, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, TAPS = 32, 48, 4, 2, 16, 2, 2
VOCABULARY, BLOCK, MASK, POSITIONS, WINDOW, THETA = 61, 5, 3, 40, 6, 100.0
ANCHORS = (3, 6, 7, 20, 31, 34)
"""With a window of 6: contexts shorter than it, as long, and longer."""

FULL, SLIDING = "full_attention", "sliding_attention"
CLOSE = 1e-3
"""No vector may decide a token by less: other arithmetic must draft the same."""

Vector = dict[str, Any]


def mask(in_block: str, window: int | None = None, origin: str = "query") -> dict[str, Any]:
    return {"in_block": in_block, "window": window, "window_origin": origin}


BOTH, CAUSAL = mask("bidirectional"), mask("causal")


def rope(**changes: Any) -> dict[str, Any]:
    plain = {"theta": THETA, "dims": HEAD_DIM, "type": "default", "scaling": [], "sections": None, "interleaved": False}
    return plain | changes


def convention(**changes: Any) -> dict[str, Any]:
    """Neutral terms of the plain z-lab drafter of these sizes, with `changes`."""
    spec = {
        "spec_version": 2, "family": "dflash", "source_format": "zlab", "tap_indices": [2, 4], "block_size": BLOCK, "shift": 0,
        "mask_token_id": MASK, "mask_embedding": False, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_layers": LAYERS,
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "attention_bias": False,
        "vocab_size": VOCABULARY, "owns_embedding": False, "owns_head": False, "draft_vocab_size": None,
        "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None, "conv_kernel_size": None,
        "conv_group_size": None, "selector_rank": None, "selector_top_k": None, "num_target_layers": 6, "rope": rope(),
        "layer_masks": [BOTH] * LAYERS, "provenance": {},
    }  # fmt: skip
    return spec | changes


SELECTOR = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7}
LLAMA3 = {"factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 40}
YARN = {"beta_fast": 4.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 400}


def scaled(kind: str, numbers: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": THETA} | numbers}


def scaling(kind: str, numbers: dict[str, Any]) -> dict[str, Any]:
    if kind == "yarn":
        numbers = {"attention_factor": 0.1 * math.log(numbers["factor"]) + 1.0, "truncate": 1.0} | numbers
    return rope(type=kind, scaling=sorted([name, float(value)] for name, value in numbers.items()))


def sliding(*layers: str, **changes: Any) -> dict[str, Any]:
    base = {"layer_types": list(layers), "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0}
    return base | changes


SLIDES, ANCHORED = mask("causal", WINDOW), mask("causal", WINDOW, "anchor")
SLIDES_BOTH, ANCHORED_BOTH = mask("bidirectional", WINDOW), mask("bidirectional", WINDOW, "anchor")
PARTIAL = {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
SECTIONS = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}

DFLASH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "sliding_causal": (sliding(SLIDING, SLIDING), {"layer_masks": [SLIDES, SLIDES]}),
    "sliding_bidirectional": (sliding(SLIDING, SLIDING, is_causal=False), {"layer_masks": [SLIDES_BOTH, SLIDES_BOTH]}),
    "mixed": (sliding(SLIDING, FULL), {"layer_masks": [SLIDES, BOTH]}),
    "mixed_causal_everywhere": (sliding(FULL, SLIDING, is_causal=True), {"layer_masks": [CAUSAL, SLIDES]}),
    "attention_bias": ({"attention_bias": True}, {"attention_bias": True}),
    "embedding_scale": ({"dflash_config": {"input_embedding_scale": 0.3}}, {"input_embedding_scale": 0.3}),
    "multiplier_and_soft_cap": (
        {"dflash_config": {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}},
        {"output_multiplier": 0.5, "final_logit_softcapping": 3.0},
    ),
    "dflash2": (
        {"dflash_config": SELECTOR} | sliding(SLIDING, SLIDING, is_causal=False),
        {"family": "dflash2", "layer_masks": [SLIDES_BOTH, SLIDES_BOTH]} | SELECTOR,
    ),
    "dflash2_multiplier_and_soft_cap": (
        {"dflash_config": SELECTOR | {"output_multiplier": 0.2, "final_logit_softcapping": 0.8}},
        {"family": "dflash2", "output_multiplier": 0.2, "final_logit_softcapping": 0.8} | SELECTOR,
    ),
    "rope_linear": (scaled("linear", {"factor": 3.0}), {"rope": scaling("linear", {"factor": 3.0})}),
    "rope_llama3": (scaled("llama3", LLAMA3), {"rope": scaling("llama3", LLAMA3)}),
    "rope_yarn": (scaled("yarn", YARN), {"rope": scaling("yarn", YARN)}),
    "rope_partial": (scaled("default", PARTIAL) | {"rotary_dim": 8}, {"rope": rope(dims=8, sections=[2, 1, 1])}),
    "rope_multi_section": (scaled("default", SECTIONS), {"rope": rope(sections=[4, 2, 2])}),
    "rope_interleaved": ({"is_neox_style": False}, {"rope": rope(interleaved=True)}),
}  # fmt: skip
"""Name -> (changes to the config, the same in neutral terms)."""

SPECULATORS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "speculators_full": ({}, {}, {}),
    "speculators_anchor_window": ({}, sliding(SLIDING, SLIDING), {"layer_masks": [ANCHORED, ANCHORED]}),
    "speculators_anchor_window_bidirectional": (
        {"sliding_window_non_causal": True}, sliding(SLIDING, SLIDING), {"layer_masks": [ANCHORED_BOTH, ANCHORED_BOTH]},
    ),
    "speculators_mixed": ({}, sliding(FULL, SLIDING), {"layer_masks": [BOTH, ANCHORED]}),
    "speculators_shifted": ({"sample_from_anchor": True}, {}, {"shift": 1}),
    "speculators_own_tables": ({}, {}, {"owns_embedding": True, "owns_head": True}),
    "speculators_reduced_vocabulary": ({"draft_vocab_size": 30}, {}, {"owns_head": True, "draft_vocab_size": 30}),
    "speculators_dflash2": (
        SELECTOR, sliding(SLIDING, SLIDING), {"family": "dflash2", "layer_masks": [ANCHORED_BOTH, ANCHORED_BOTH]} | SELECTOR,
    ),
    "speculators_dflash2_shifted": (SELECTOR | {"sample_from_anchor": True}, {}, {"family": "dflash2", "shift": 1} | SELECTOR),
}  # fmt: skip
"""Name -> (changes to the speculator's config, to its layers' config, the same in neutral terms)."""


def zlab_config(changes: dict[str, Any]) -> dict[str, Any]:
    changes = dict(changes)
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3]} | changes.pop("dflash_config", {})
    plain = {
        "architectures": ["DFlash2DraftModel" if "selector_rank" in nested else "DFlashDraftModel"], "model_type": "qwen3",
        "attention_bias": False, "block_size": BLOCK, "head_dim": HEAD_DIM, "hidden_act": "silu", "hidden_size": HIDDEN,
        "intermediate_size": INNER, "max_position_embeddings": 1600, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS, "num_target_layers": 6, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY,
        "tie_word_embeddings": False, "layer_types": [FULL] * LAYERS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
    }  # fmt: skip
    return plain | changes | {"dflash_config": nested}


def seeded(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Weights that bf16 holds exactly: norms far from 1, attention that is not flat, convolutions that matter."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name in sorted(shapes):
        drawn = torch.randn(shapes[name], generator=generator)
        if "norm" in name:
            value = 0.5 + drawn.abs().clamp(max=1.5)
        elif "codebook" in name or "base_kernel" in name or "bias" in name:
            value = drawn * 0.6
        elif "kernel_projection" in name:
            value = drawn * 0.5 / shapes[name][-1] ** 0.5
        elif name in ("embed_tokens.weight", "lm_head.weight"):
            value = drawn
        else:
            value = drawn * 1.5 / shapes[name][-1] ** 0.5
        made[name] = value.bfloat16().float()
    return made


def inputs(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    shapes = {"states": (POSITIONS, TAPS * HIDDEN), "embedding": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN)}
    made = {name: torch.randn(shape, generator=generator).bfloat16().float() for name, shape in shapes.items()}
    return made | {"token_ids": torch.randint(0, VOCABULARY, (POSITIONS,), generator=generator)}


def short(name: str) -> str:
    """Checkpoints name the codebooks without `.weight`."""
    return name.removesuffix(".weight") if "codebook" in name else name


# --- PyPI dflash -----------------------------------------------------------------------------------------------------------


def dflash_vector(name: str, seed: int) -> Vector:
    import dflash.model as public
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    changes, neutral = DFLASH[name]
    config = zlab_config(changes)
    kind = public.DFlash2DraftModel if "selector_rank" in config["dflash_config"] else public.DFlashDraftModel
    model = kind(Qwen3Config(**copy.deepcopy(config))).eval()
    put_rotary(model, public, name)
    weights = seeded({short(key): tuple(value.shape) for key, value in model.state_dict().items()}, seed)
    model.load_state_dict({key: weights[short(key)] for key in model.state_dict()}, strict=True)
    given = inputs(seed)
    found = run_dflash(public, model, config, given)
    again = run_dflash(
        public, copy.deepcopy(model).double(), config, {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    )
    return {"config": config, "spec": convention(**neutral), "weights": weights, "inputs": given, "found": found, "again": again}


def put_rotary(model: Any, public: Any, name: str) -> None:
    """transformers' rotation of a model that has this kind, in place of the drafter's whole-head one."""
    from transformers.models.glm import modeling_glm
    from transformers.models.qwen3 import modeling_qwen3
    from transformers.models.qwen3_5 import modeling_qwen3_5

    turn = modeling_qwen3.apply_rotary_pos_emb
    if name in ("rope_partial", "rope_multi_section"):
        model.rotary_emb = modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(model.config)
        turn = modeling_qwen3_5.apply_rotary_pos_emb
    elif name == "rope_interleaved":
        turn = modeling_glm.apply_rotary_pos_emb

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rows = q.shape[-2]
        return turn(q, q, cos[..., -rows:, :], sin[..., -rows:, :])[0], turn(k, k, cos, sin)[0]

    public.apply_rotary_pos_emb = turned


@torch.inference_mode()
def run_dflash(public: Any, model: Any, config: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Tensor]:
    head = SimpleNamespace(weight=given["head"])
    target = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=given["embedding"]))
    scale = config["dflash_config"].get("input_embedding_scale", 1.0)
    hidden, logits, tokens = [], [], []
    for anchor in ANCHORS:
        ids = torch.tensor([[int(given["token_ids"][anchor])] + [MASK] * (BLOCK - 1)])
        rows = model(
            position_ids=torch.arange(anchor + BLOCK)[None],
            noise_embedding=public._raw_input_embeddings(target, ids, scale),
            target_hidden=given["states"][None, :anchor],
        )[:, 1 - BLOCK :]
        scores = model.compute_logits(rows, lambda rows: rows @ head.weight.T)
        drafted = scores.argmax(-1)
        if isinstance(model, public.DFlash2DraftModel):
            drafted = model.propose(rows, ids[:, 0], lambda rows: rows @ head.weight.T, 0.0)[0]
        hidden.append(rows[0])
        logits.append(scores[0])
        tokens.append(drafted[0])
    return {"hidden": torch.stack(hidden), "logits": torch.stack(logits), "tokens": torch.stack(tokens)}


# --- speculators -----------------------------------------------------------------------------------------------------------


def speculators_vector(name: str, seed: int) -> Vector:
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    changes, layers, neutral = SPECULATORS[name]
    plain = {key: value for key, value in zlab_config(layers).items() if key not in _NOT_OF_LAYERS}
    transformer = Qwen3Config(**plain)
    transformer._attn_implementation = "sdpa"
    settings = {
        "block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [2, 4], "draft_vocab_size": VOCABULARY,
    } | changes  # fmt: skip
    two = "selector_rank" in settings
    config = (DFlash2SpeculatorConfig if two else DFlashSpeculatorConfig)(transformer_layer_config=transformer, **settings)
    model = (DFlash2DraftModel if two else DFlashDraftModel)(config=config).eval()
    given = inputs(seed)
    own = ("embed_tokens.weight", "lm_head.weight") if neutral.get("owns_embedding") else ()
    own = ("lm_head.weight",) if neutral.get("draft_vocab_size") else own
    kept = {key: value for key, value in model.state_dict().items() if key in own or not key.startswith(_NOT_SAVED)}
    weights = seeded({short(key): tuple(value.shape) for key, value in kept.items() if value.is_floating_point()}, seed)
    if neutral.get("draft_vocab_size"):
        drawn = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[: neutral["draft_vocab_size"]]
        weights["d2t"] = drawn.sort().values - torch.arange(len(drawn))
    fill_speculator(model, weights, given)
    found = run_speculators(model, given)
    again = run_speculators(
        copy.deepcopy(model).double(), {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    )
    neutral = {"source_format": "speculators", "num_target_layers": None} | neutral
    stored = json.loads(config.to_json_string())
    return {"config": stored, "spec": convention(**neutral), "weights": weights, "inputs": given, "found": found, "again": again}


_NOT_OF_LAYERS = ("architectures", "block_size", "num_target_layers", "dflash_config")
_NOT_SAVED = ("embed_tokens.", "lm_head.", "verifier_", "t2d", "d2t")


def fill_speculator(model: Any, weights: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Its own tensors, and the target's where it owns none."""
    state = model.state_dict()
    state |= {"embed_tokens.weight": given["embedding"], "verifier_norm.weight": torch.ones(HIDDEN)}
    state |= {name: torch.zeros_like(state[name]) for name in ("verifier_lm_head.weight",)}
    if state["lm_head.weight"].shape == given["head"].shape:
        state["lm_head.weight"] = given["head"]
    if "d2t" in weights:
        tokens = torch.arange(len(weights["d2t"])) + weights["d2t"]
        state["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, tokens, True)
    names = {short(key): key for key in state}
    model.load_state_dict(state | {names[name]: tensor for name, tensor in weights.items()}, strict=True)


@torch.inference_mode()
def run_speculators(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    supervised = torch.zeros(1, POSITIONS, dtype=torch.long)
    supervised[0, list(ANCHORS)] = 1  # its selection draws as many anchors as may be drawn: all of these, in order
    ids = given["token_ids"][None]
    hidden, logits, *_ = model._backbone_forward(
        given["states"][None], ids, supervised, torch.zeros(1, POSITIONS, HIDDEN, dtype=given["states"].dtype),
        torch.zeros(1, POSITIONS, dtype=torch.long), max_anchors=len(ANCHORS),
    )  # fmt: skip
    first = 0 if model.config.sample_from_anchor else 1
    hidden = hidden.view(len(ANCHORS), BLOCK, -1)[:, first:]
    logits = logits.view(len(ANCHORS), BLOCK, -1)[:, first:]
    tokens = logits.argmax(-1)
    if model.d2t is not None:
        tokens = tokens + model.d2t[tokens]
    if hasattr(model, "candidate_selector"):
        previous, path = given["token_ids"][list(ANCHORS)], []
        for slot in range(hidden.shape[1]):
            best, scores = model.candidate_selector.select(logits[:, slot], hidden[:, slot], previous)
            previous = best.gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
            path.append(previous)
        tokens = torch.stack(path, dim=1)
    return {"hidden": hidden, "logits": logits, "tokens": tokens}


# --- files -----------------------------------------------------------------------------------------------------------------


def clear(vector: Vector) -> bool:
    """Whether double precision drafts the same tokens, and no plain token is decided by less than CLOSE."""
    best = vector["found"]["logits"].topk(2, dim=-1).values
    decided = vector["spec"]["family"] == "dflash2" or float((best[..., 0] - best[..., 1]).min()) > CLOSE
    return decided and torch.equal(vector["found"]["tokens"], vector["again"]["tokens"])


def write(name: str, vector: Vector, library: str, seed: int, directory: Path) -> None:
    small = {
        f"drafter.{key}": tensor.bfloat16() if tensor.is_floating_point() else tensor for key, tensor in vector["weights"].items()
    }
    for key, tensor in vector["inputs"].items():
        small[f"inputs.{key}"] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    small |= {f"outputs.{key}": tensor.contiguous() for key, tensor in vector["found"].items()}
    save_file(small, directory / f"{name}.safetensors")
    facts = {
        "library": library, "torch": torch.__version__.split("+")[0], "transformers": transformers.__version__, "seed": seed,
        "anchors": list(ANCHORS), "spec": vector["spec"], "config": vector["config"],
    }  # fmt: skip
    (directory / f"{name}.json").write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


def main(library: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    make, names, version = {
        "dflash": (dflash_vector, DFLASH, "dflash 0.1.0"),
        "speculators": (speculators_vector, SPECULATORS, "speculators 0.9.0"),
    }[library]
    for name in names:
        seed = next(seed for seed in range(50) if clear(make(name, seed)))
        write(name, make(name, seed), version, seed, directory)
        print(name, seed)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
