"""Which kernels computed the hidden states: per function of the linear-attention layers, and the versions around them.

transformers chooses kernel package or torch fallback per function at import, and says so nowhere public. The choice is
read from the closures it leaves; where those look different from what is known here, the record says "unknown".
"""

from __future__ import annotations

import inspect
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

from dflash_model.digests import json_digest
from dflash_model.target.backbone import Backbone

TORCH = "torch"
UNKNOWN = "unknown"
PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "triton",
    "kernels",
    "accelerate",
)
COMPUTING = ("torch", "transformers", "flash-linear-attention", "fla-core", "causal-conv1d", "triton", "kernels")
"""Those of them whose version can change a state; the others move bytes only."""
ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_CHOICE = ("implementation", "is_new_implementation")


def describe_backend(backbone: Backbone) -> dict[str, Any]:
    """What hidden states depend on besides weights and tokens: {kernels, attention, dtype, device, versions}; JSON-able."""
    device = backbone.device
    return {
        "kernels": kernel_choices(backbone),
        "attention": str(backbone.model.config.get_text_config()._attn_implementation),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": library_versions(),
    }


def backend_digest(backend: dict[str, Any]) -> str:
    """sha256 over what can change a state in `describe_backend`'s value: states of another digest are never mixed in."""
    versions = {name: version for name, version in backend["versions"].items() if name in COMPUTING}
    return json_digest(backend | {"versions": versions})


def kernel_choices(backbone: Backbone) -> dict[str, str]:
    """Function name -> "torch" (reference fallback), the module that replaces it, or "unknown"; {} for plain attention models."""
    config = backbone.model.config.get_text_config()
    recurrent = [kind for kind in getattr(config, "layer_types", None) or () if kind not in ATTENTION_TYPES]
    module = sys.modules.get(type(backbone.decoder).__module__)
    choices = {} if module is None else _choices_in(module)
    return choices if choices or not recurrent else dict.fromkeys(sorted(set(recurrent)), UNKNOWN)


def _choices_in(module: ModuleType) -> dict[str, str]:
    """The functions of a modelling module that transformers may have replaced, and by what."""
    choices = {}
    for name, function in vars(module).items():
        if inspect.isfunction(function) and function.__module__ == module.__name__ and hasattr(function, "__wrapped__"):
            choices[name.removeprefix("torch_")] = _choice_of(function)
    return choices


def _choice_of(function: Any) -> str:
    try:
        found = inspect.getclosurevars(function).nonlocals
    except (TypeError, ValueError):
        return UNKNOWN
    if not all(name in found for name in _CHOICE):
        return UNKNOWN
    if not found["is_new_implementation"]:
        return TORCH
    return str(getattr(found["implementation"], "__module__", UNKNOWN))


def library_versions() -> dict[str, str]:
    """Installed versions of the packages that take part in the computation; absent ones are left out."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
