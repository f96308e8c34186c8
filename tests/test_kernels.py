"""The record of which kernels ran: read where it can be, "unknown" where it cannot, never guessed."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_model.target.backbone import Backbone, backbone_of
from dflash_model.target.kernels import describe_backend, kernel_choices, library_versions
from tests.tiny_targets import tiny_model

FUNCTIONS = {"causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "recurrent_gated_delta_rule"}


def _module_with(monkeypatch: pytest.MonkeyPatch, backbone: Backbone, functions: dict[str, Any]) -> None:
    """Put functions in place of the ones that the decoder's modelling module holds."""
    name = type(backbone.decoder).__module__
    module = ModuleType(name)
    for key, function in functions.items():
        function.__module__ = name
        setattr(module, key, function)
    monkeypatch.setitem(sys.modules, name, module)


def _wrapped(*, implementation: Any, is_new_implementation: bool) -> Any:
    """A function with the closure that transformers leaves."""

    def original() -> None: ...

    @functools.wraps(original)
    def wrapper() -> Any:
        return implementation, is_new_implementation

    return wrapper


def test_the_torch_fallback_of_a_hybrid_is_recorded_per_function() -> None:
    assert kernel_choices(backbone_of(tiny_model("qwen3_5_text"))) == dict.fromkeys(FUNCTIONS, "torch")


def test_a_plain_attention_model_has_nothing_to_record() -> None:
    assert kernel_choices(backbone_of(tiny_model("qwen3"))) == {}


def test_a_replaced_function_is_recorded_with_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of(tiny_model("qwen3_5_text"))
    fast = _wrapped(implementation=SimpleNamespace(__module__="fla.ops.gated_delta_rule.chunk"), is_new_implementation=True)
    slow = _wrapped(implementation=SimpleNamespace(__module__="x"), is_new_implementation=False)
    _module_with(monkeypatch, backbone, {"torch_chunk_gated_delta_rule": fast, "causal_conv1d_fn": slow})
    assert kernel_choices(backbone) == {"chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk", "causal_conv1d_fn": "torch"}


def test_a_closure_of_another_shape_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of(tiny_model("qwen3_5_text"))
    chosen = object()

    def original() -> None: ...

    @functools.wraps(original)
    def wrapper() -> Any:
        return chosen

    _module_with(monkeypatch, backbone, {"torch_chunk_gated_delta_rule": wrapper})
    assert kernel_choices(backbone) == {"chunk_gated_delta_rule": "unknown"}


def test_a_hybrid_whose_functions_are_not_found_is_unknown_not_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = backbone_of(tiny_model("qwen3_5_text"))
    _module_with(monkeypatch, backbone, {})
    assert kernel_choices(backbone) == {"linear_attention": "unknown"}


def test_the_backend_names_dtype_device_attention_and_versions() -> None:
    backend = describe_backend(backbone_of(tiny_model("qwen3")))
    assert (backend["dtype"], backend["device"], backend["attention"], backend["kernels"]) == ("float32", "cpu", "sdpa", {})
    assert backend["versions"] == library_versions()
    assert backend["versions"]["torch"] == torch.__version__
    assert "triton" in library_versions() or "fla-core" not in library_versions()
