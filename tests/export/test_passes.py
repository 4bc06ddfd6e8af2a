"""Each pass: the rewritten graph has the nodes it should and computes the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from export_models import session

from edgelin.export.passes.edit import add_constant
from edgelin.export.passes.fold import fold
from edgelin.export.passes.hoist_reshapes import hoist_reshapes
from edgelin.export.passes.norms import decompose_norms, fuse_norms
from edgelin.export.passes.opset import set_opset
from edgelin.export.passes.reshapes import clean_reshapes
from edgelin.export.passes.shared_keys import share_keys
from edgelin.export.passes.silu import expand_silu, fuse_silu
from edgelin.export.passes.softplus import simplify_softplus
from edgelin.export.passes.splits import merge_splits
from edgelin.export.profiles import PROFILES

B, T, H, K = "batch", "time", 2, 4


class Sketch:
    """A small graph over ``x`` ``[batch, time, H K]``, built node by node with known shapes."""

    def __init__(self) -> None:
        self.x = ir.Value(
            name="x", shape=ir.Shape([B, T, H * K]), type=ir.TensorType(ir.DataType.FLOAT)
        )
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []

    def op(
        self, op_type: str, inputs: Sequence[ir.Value], shape: list[Any], **attributes: Any
    ) -> ir.Value:
        """Append a node whose outputs have this shape."""
        count, domain = attributes.pop("outputs", 1), attributes.pop("domain", "")
        node = ir.node(
            op_type, list(inputs), attributes=attributes, num_outputs=count, domain=domain
        )
        for output in node.outputs:
            output.shape, output.type = ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        self.nodes.append(node)
        return node.outputs[0]

    def const(self, array: Any) -> ir.Value:
        """An initializer."""
        array = np.asarray(array)
        value = ir.Value(
            name=f"c{len(self.weights)}",
            shape=ir.Shape(array.shape),
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            const_value=ir.Tensor(array),
        )
        self.weights.append(value)
        return value

    def reshape(self, value: ir.Value, shape: list[Any]) -> ir.Value:
        """A Reshape as torch exports it: the shape is put together at run time."""
        parts = []
        for axis, size in enumerate(shape):
            if isinstance(size, int):
                parts.append(self.const(np.array([size])))
            else:
                parts.append(self.op("Shape", [self.x], [1], start=axis, end=axis + 1))
                parts[-1].type = ir.TensorType(ir.DataType.INT64)
        target = self.op("Concat", parts, [len(shape)], axis=0)
        target.type = ir.TensorType(ir.DataType.INT64)
        return self.op("Reshape", [value, target], shape, allowzero=1)

    def model(self, *outputs: ir.Value) -> ir.Model:
        """The finished graph."""
        for i, value in enumerate(outputs):
            value.name = f"y{i}"
        graph = ir.Graph(
            [self.x],
            outputs,
            nodes=self.nodes,
            initializers=self.weights,
            opset_imports={"": 23, "com.microsoft": 1},
            name="sketch",
        )
        return ir.Model(graph, ir_version=10)


def check(
    model: ir.Model, transform: Callable[[ir.Model], bool], wanted: list[str], **options: Any
) -> None:
    """Run before and after; compare operators and numbers; a second run changes nothing."""
    x = np.random.default_rng(0).standard_normal((2, 3, H * K)).astype(np.float32)
    before = session(model).run(None, {"x": x})
    assert transform(model)
    assert [node.op_type for node in model.graph] == wanted
    after = session(model).run(None, {"x": x})
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert not transform(model)


def test_reshape_shapes_become_constant() -> None:
    s = Sketch()
    heads = s.reshape(s.x, [B, T, H, K])
    y = s.op("Neg", [heads], [B, T, H, K])
    check(s.model(y), clean_reshapes, ["Reshape", "Neg"])


def test_reshape_there_and_back_falls_away() -> None:
    s = Sketch()
    flat = s.reshape(s.reshape(s.x, [B, T, H, K]), [B, T, H * K])
    y = s.op("Neg", [flat], [B, T, H * K])
    check(s.model(y), clean_reshapes, ["Neg"])


def test_transposes_cancel_and_identities_go() -> None:
    s = Sketch()
    turned = s.op("Transpose", [s.x], [B, H * K, T], perm=[0, 2, 1])
    back = s.op("Transpose", [turned], [B, T, H * K], perm=[0, 2, 1])
    same = s.op("Cast", [s.op("Identity", [back], [B, T, H * K])], [B, T, H * K], to=1)
    y = s.op("Neg", [same], [B, T, H * K])
    check(s.model(y), clean_reshapes, ["Neg"])


def test_a_reshape_that_moves_an_axis_stays() -> None:
    s = Sketch()
    first = s.op("Reshape", [s.x, s.const(np.array([0, -1, K]))], [B, "rows", K])
    y = s.op("Reshape", [first, s.const(np.array([0, 0, H, 2]))], [B, "rows", H, 2])
    model = s.model(y)
    clean_reshapes(model)
    assert [node.op_type for node in model.graph] == ["Reshape", "Reshape"]


def test_flatten_before_split() -> None:
    s = Sketch()
    heads = s.op("Reshape", [s.x, s.const(np.array([0, 0, H, K]))], [B, T, H, K])
    turned = s.op("Softmax", [heads], [B, T, H, K], axis=-1)
    first = s.op("Split", [turned], [B, T, 1, K], axis=2, num_outputs=2, outputs=2)
    flat = s.const(np.array([0, 0, K]))
    parts = [s.op("Reshape", [v, flat], [B, T, K]) for v in first.producer().outputs]
    y = s.op("Sub", parts, [B, T, K])
    check(s.model(y), hoist_reshapes, ["Reshape", "Softmax", "Reshape", "Split", "Sub"])


def test_gate_is_applied_after_the_reshape() -> None:
    s = Sketch()
    heads = s.const(np.array([0, 0, H, K]))
    left = s.op("Reshape", [s.x, heads], [B, T, H, K])
    left = s.op("Softmax", [left], [B, T, H, K], axis=-1)
    gate = s.op("Sigmoid", [s.op("Reshape", [s.x, heads], [B, T, H, K])], [B, T, H, K])
    product = s.op("Mul", [left, gate], [B, T, H, K])
    y = s.op("Reshape", [product, s.const(np.array([0, 0, H * K]))], [B, T, H * K])
    wanted = ["Reshape", "Softmax", "Sigmoid", "Reshape", "Mul"]
    check(s.model(y), hoist_reshapes, wanted)


def test_elementwise_between_reshapes_needs_neither() -> None:
    s = Sketch()
    heads = s.op("Reshape", [s.x, s.const(np.array([0, 0, H, K]))], [B, T, H, K])
    more = s.op("Elu", [heads], [B, T, H, K])
    more = s.op("Add", [more, s.const(np.float32(1))], [B, T, H, K])
    y = s.op("Reshape", [more, s.const(np.array([0, 0, H * K]))], [B, T, H * K])
    check(s.model(y), hoist_reshapes, ["Elu", "Add"])


def test_softplus_loses_its_threshold() -> None:
    s = Sketch()
    shape = [B, T, H * K]
    big = s.op("Mul", [s.x, s.const(np.float32(30))], shape)
    above = s.op("Greater", [big, s.const(np.float32(20))], shape)
    above.type = ir.TensorType(ir.DataType.BOOL)
    y = s.op("Where", [above, big, s.op("Softplus", [big], shape)], shape)
    check(s.model(y), simplify_softplus, ["Mul", "Softplus"])


def test_silu_is_fused_and_expanded() -> None:
    s = Sketch()
    shape = [B, T, H * K]
    y = s.op("Mul", [s.op("Sigmoid", [s.x], shape), s.x], shape)
    model = s.model(y)
    check(model, fuse_silu, ["QuickGelu"])
    check(model, expand_silu, ["Sigmoid", "Mul"])


def _norms() -> ir.Model:
    s = Sketch()
    shape = [B, T, H * K]
    weight = s.const(np.linspace(0.5, 2, H * K, dtype=np.float32))
    first = s.op("RMSNormalization", [s.x, weight], shape, axis=-1, epsilon=1e-6)
    total = s.op("Add", [s.x, first], shape)
    second = s.op("RMSNormalization", [total, weight], shape, axis=-1, epsilon=1e-6)
    return s.model(second, total)


def test_norms_take_in_the_residual() -> None:
    wanted = ["SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"]
    check(_norms(), fuse_norms, wanted)


def test_norms_of_standard_operators() -> None:
    norm = ["Pow", "ReduceMean", "Add", "Sqrt", "Div", "Mul"]
    check(_norms(), decompose_norms, [*norm, "Add", *norm])


def test_a_scalar_sum_is_no_residual() -> None:
    s = Sketch()
    shape = [B, T, H * K]
    weight = s.const(np.ones(H * K, np.float32))
    total = s.op("Add", [s.x, s.const(np.ones(H * K, np.float32))], shape)
    y = s.op("RMSNormalization", [total, weight], shape, axis=-1, epsilon=1e-6)
    check(s.model(y), fuse_norms, ["Add", "SimplifiedLayerNormalization"])


def test_constants_are_folded_unless_they_would_grow() -> None:
    s = Sketch()
    shape = [B, T, H * K]
    half = s.op("Mul", [s.const(np.float32(3)), s.const(np.float32(2))], [])
    wide = s.op(
        "Expand", [s.const(np.ones(1, np.float32)), s.const(np.array([1 << 18]))], [1 << 18]
    )
    one = s.op("ReduceMax", [wide], [1])
    y = s.op("Add", [s.op("Mul", [s.x, half], shape), one], shape)
    check(s.model(y), fold, ["Expand", "ReduceMax", "Mul", "Add"])


def test_opset_refuses_what_it_does_not_have() -> None:
    with pytest.raises(Exception, match="RMSNormalization"):
        set_opset(_norms(), PROFILES["plain"])
    model = _norms()
    model.graph[0].domain = "edgelin"
    with pytest.raises(ValueError, match="without a translation: RMSNormalization"):
        set_opset(model, PROFILES["onnx"])


def test_a_constant_with_nan_is_found_again() -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10)
    content = np.array([1, np.nan], np.float32)
    first = add_constant(model, "c", content)
    assert add_constant(model, "c", content.copy()) is first
    for other in (content[::-1].copy(), content[:1], content.astype(np.float64)):
        with pytest.raises(ValueError, match="exists with another content"):
            add_constant(model, "c", other)


def shared(copies: int, groups: int) -> ir.Model:
    """Linear attention whose keys and queries serve several heads of values each."""
    s, heads, width = Sketch(), copies * groups, H * K // (2 * groups)
    apart = s.reshape(s.x, [B, T, 2 * groups, 1, width])
    times = s.const(np.array([1, 1, 1, copies, 1]))
    repeated = s.op("Expand", [apart, times], [B, T, 2 * groups, copies, width])
    joined = s.reshape(repeated, [B, T, 2 * heads * width])
    split = [joined], [B, T, heads * width]
    keys = s.op("Split", *split, axis=2, num_outputs=2, outputs=2)
    queries = s.nodes[-1].outputs[1]
    weight = s.const(np.random.default_rng(1).standard_normal((H * K, 3 * heads), np.float32))
    v = s.op("MatMul", [s.x, weight], [B, T, 3 * heads])
    attributes = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "linear"}
    y = s.op("LinearAttention", [queries, keys, v], [B, T, 3 * heads], domain="com.microsoft",
             scale=0.5, outputs=2, **attributes)  # fmt: skip
    return s.model(y)


@pytest.mark.parametrize(("copies", "groups"), [(3, 1), (2, 2)])
def test_shared_keys_are_not_repeated(copies: int, groups: int) -> None:
    model = shared(copies, groups)
    clean_reshapes(model)
    wanted = ["Reshape", "MatMul", "Reshape", "Split", "LinearAttention"]
    check(model, share_keys, wanted)
    assert model.graph[-1].attributes.get_int("q_num_heads") == groups
    assert clean_reshapes(model)
    assert [node.op_type for node in model.graph] == ["MatMul", "Split", "LinearAttention"]


@pytest.mark.parametrize("middle", [False, True])
def test_a_split_of_a_split_is_one(middle: bool) -> None:
    """Its parts keep their places and names, whichever part was split again."""
    s, sizes = Sketch(), np.array([2, 4, 2] if middle else [4, 4])
    s.op("Split", [s.x, s.const(sizes)], [B, T, 2], axis=2, outputs=len(sizes))
    first = s.nodes[-1]
    for output, size in zip(first.outputs, sizes.tolist(), strict=True):
        output.shape = ir.Shape([B, T, size])
    again = first.outputs[1 if middle else 0]
    s.op("Split", [again], [B, T, 2], axis=2, num_outputs=2, outputs=2)
    parts = [*s.nodes[-1].outputs, *(value for value in first.outputs if value is not again)]
    check(s.model(*parts), merge_splits, ["Split"])


@pytest.mark.parametrize("change", ["axis", "used", "unknown"])
def test_other_splits_stay(change: str) -> None:
    s = Sketch()
    a = s.op("Split", [s.x], [B, T, "half" if change == "unknown" else 4], axis=2, num_outputs=2,
             outputs=2)  # fmt: skip
    axis, size = (1, [B, "part", 4]) if change == "axis" else (2, [B, T, 2])
    if change == "unknown":
        size = [B, T, "quarter"]
    part = s.op("Split", [a], size, axis=axis, num_outputs=2, outputs=2)
    outputs = [part, s.nodes[-1].outputs[1], s.nodes[0].outputs[1]]
    assert not merge_splits(s.model(*outputs, *([a] if change == "used" else [])))
