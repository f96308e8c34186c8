"""Tensors as pickles describe them: honest forms are read, everything else has a reason."""

import re
from typing import Any

import pytest

from dflash_model.checkpoint.symbols import Global, Node, PersistentId
from dflash_model.checkpoint.torch_tensor import MAX_WRAPPERS, Geometry, Refusal, read_tensor


def storage(kind: str = "FloatStorage", numel: Any = 6, *rest: object) -> PersistentId:
    return PersistentId(("storage", Global("torch", kind), "0", "cuda:0", numel, *rest))


def call(name: str, *args: object, module: str = "torch._utils") -> Node:
    return Node(Global(module, name), args)


def plain(*, shape: Any = (2, 3), stride: Any = (3, 1), offset: Any = 0, of: object = None) -> Node:
    return call("_rebuild_tensor_v2", of or storage(), offset, shape, stride, False, {})


def geometry_of(node: object) -> Geometry:
    found = read_tensor(node)
    assert isinstance(found, Geometry), found
    return found


def reason_of(node: object) -> str:
    found = read_tensor(node)
    assert isinstance(found, Refusal), found
    assert found.fix
    return found.reason


def test_the_three_rebuild_functions_agree() -> None:
    second = geometry_of(plain(offset=0))
    assert second == geometry_of(call("_rebuild_tensor", storage(), 0, (2, 3), (3, 1)))
    third = call("_rebuild_tensor_v3", storage("UntypedStorage", 24), 0, (2, 3), (3, 1), False, {}, Global("torch", "float32"))
    assert second == geometry_of(third)
    assert (second.dtype, second.size_bytes, second.storage_bytes) == ("F32", 24, 24)


def test_version_three_takes_the_dtype_from_its_argument() -> None:
    node = call("_rebuild_tensor_v3", storage("UntypedStorage", 6), 0, (6,), (1,), False, {}, Global("torch", "float8_e4m3fn"))
    assert (geometry_of(node).dtype, geometry_of(node).size_bytes) == ("F8_E4M3", 6)


def test_wrappers_are_looked_through() -> None:
    parameter = call("_rebuild_parameter", plain(), True, {})
    stateful = call("_rebuild_parameter_with_state", plain(), True, {}, {"note": 1})
    inner = plain()
    typed = call(
        "_rebuild_from_type_v2", inner.called, Global("torch", "Tensor"), inner.args, {"note": 1}, module="torch._tensor"
    )
    buffer = call(
        "_rebuild_from_type_v2", inner.called, Global("torch.nn.parameter", "Parameter"), inner.args, {}, module="torch._tensor"
    )
    for node in (parameter, stateful, typed, buffer, call("_rebuild_parameter", parameter, True, {})):
        assert geometry_of(node) == geometry_of(plain())


def test_endless_wrappers_are_refused() -> None:
    node = plain()
    for _ in range(MAX_WRAPPERS):
        node = call("_rebuild_parameter", node, True, {})
    assert "too many times" in reason_of(node)


def test_what_is_no_tensor_is_none() -> None:
    for value in (None, 5, "x", [], {}, storage(), Node(Global("argparse", "Namespace"), ()), Node("no name", ())):
        assert read_tensor(value) is None
    assert read_tensor(Node(Global("evil._utils", "_rebuild_tensor_v2"), plain().args)) is None


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (plain(shape=(2, 4)), "reaches to byte 28 of a storage of 24"),
        (plain(offset=1), "reaches to byte 28"),
        (plain(stride=(4, 1)), "reaches to byte 28"),
        (plain(shape=(2,)), "sizes are no sizes"),
        (plain(shape=(-1, 3)), "sizes are no sizes"),
        (plain(shape=(True, 3)), "sizes are no sizes"),
        (plain(shape=[2, 3]), "sizes are no sizes"),
        (plain(shape=("2", 3)), "sizes are no sizes"),
        (plain(offset=-1), "sizes are no sizes"),
        (plain(offset=None), "sizes are no sizes"),
        (plain(shape=(1 << 70, 1), stride=(0, 0)), "sizes are no sizes"),
        (plain(shape=(1,) * 65, stride=(1,) * 65), "more than 64 dimensions"),
        (plain(shape=(1 << 61, 1 << 61), stride=(0, 0)), "repeats its 24 bytes"),
        (plain(of=PersistentId("storage")), "its storage is no storage"),
        (plain(of=storage(numel=-1)), "its storage is no storage"),
        (plain(of=storage(numel=True)), "its storage is no storage"),
        (plain(of=storage("FloatStorage", 6, ("5", 0, 24))), "before 0.4"),
        (plain(of=storage("QInt8Storage")), "quantized"),
        (plain(of=storage("ComplexDoubleStorage")), "safetensors lacks"),
        (plain(of=storage("UntypedStorage")), "without a dtype"),
        (plain(of=Node(None, ())), "it has no storage"),
        (call("_rebuild_tensor_v2"), "it has no storage"),
        (call("_rebuild_tensor_v2", storage(), 0, (6,), (1,), False, {}, {"conj": True}), r"lazy view of its storage \(conj\)"),
        (call("_rebuild_tensor_v2", storage(), 0, (6,), (1,), False, {}, {"neg": True}), r"\(neg\)"),
        (call("_rebuild_tensor_v3", storage(), 0, (6,), (1,), False, {}), "dtype is missing"),
        (call("_rebuild_tensor_v3", storage(), 0, (6,), (1,), False, {}, Global("torch", "float4_e2m1fn_x2")), "safetensors lacks"),
        (call("_rebuild_parameter", None), "without data"),
        (call("_rebuild_from_type_v2", None, Global("my", "Sub"), (), {}, module="torch._tensor"), "subclass my.Sub"),
        (call("_rebuild_from_type_v2", None, Global("torch.distributed.tensor", "DTensor"), (), module="torch._tensor"), "DTensor"),
        (call("_rebuild_wrapper_subclass", Global("torchao", "Int4Tensor")), "subclass torchao.Int4Tensor"),
        (call("_rebuild_from_the_future"), "_rebuild_from_the_future, which is not known"),
    ],
)  # fmt: skip
def test_everything_else_has_a_reason(node: Node, reason: str) -> None:
    assert re.search(reason, reason_of(node))


def test_flags_that_are_off_are_no_hindrance() -> None:
    node = call("_rebuild_tensor_v2", storage(), 0, (6,), (1,), False, {}, {"conj": False})
    assert geometry_of(node).shape == (6,)


def test_empty_tensors_need_no_storage() -> None:
    found = geometry_of(plain(shape=(0, 1 << 40), stride=(1 << 40, 1), of=storage(numel=0)))
    assert (found.size_bytes, found.span) == (0, (0, 0))
