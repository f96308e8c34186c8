"""Wraps bundled drafter weights in the layout of a raw training file, as a training run would leave them.

fp32 `model_state_dict`, an AdamW-shaped `optimizer_state_dict` twice its size, `step`, and `args` as a Namespace. The
moments are seeded noise: nothing reads them, they are the bulk that a relay should not move for nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file


def training_state(weights: dict[str, torch.Tensor], *, step: int) -> dict[str, object]:
    """What the trainer saves at `step`: model, optimizer, step and args."""
    generator = torch.Generator().manual_seed(step)
    model = {name: tensor.float() for name, tensor in weights.items()}
    moments = {
        index: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.randn(tensor.shape, generator=generator) * 1e-3,
            "exp_avg_sq": torch.rand(tensor.shape, generator=generator) * 1e-6,
        }
        for index, tensor in enumerate(model.values())
    }
    groups = [{"lr": 6e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "params": list(moments)}]
    args = argparse.Namespace(
        block_size=8,
        target_layer_ids=[1, 4, 6],
        mask_token_id=3,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        layer_types=["full_attention"] * sum(name.endswith("input_layernorm.weight") for name in weights),
        sample_from_anchor=False,
        seed=0,
    )
    return {
        "model_state_dict": model,
        "optimizer_state_dict": {"state": moments, "param_groups": groups},
        "step": step,
        "args": args,
    }


def main() -> None:
    """Write DESTINATION from DRAFTER_DIRECTORY."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", type=Path, help="directory with model.safetensors")
    parser.add_argument("destination", type=Path, help="the .pt file to write")
    parser.add_argument("--step", type=int, required=True)
    options = parser.parse_args()
    state = training_state(load_file(options.drafter / "model.safetensors"), step=options.step)
    options.destination.parent.mkdir(parents=True, exist_ok=True)
    part = options.destination.with_suffix(".pt.part")
    torch.save(state, part)
    part.replace(options.destination)


if __name__ == "__main__":
    main()
