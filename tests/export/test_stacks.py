"""Taking a tensor back out of a stack of tensors."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from edgelin.export.passes.edit import add_constant
from edgelin.export.passes.stacks import cancel_stacks


def stacked(picks: tuple[tuple[int, int], ...], axes: tuple[int, int] = (2, 2)) -> ir.Model:
    """-a and -b stacked on an axis; for each pick (start, end) a slice of it, squeezed."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    inputs = [ir.Value(name=n, shape=ir.Shape(["batch", 3]), type=kind) for n in "ab"]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 21}, name="stacks")
    model = ir.Model(graph, ir_version=9)

    def ints(*values: int) -> ir.Value:
        return add_constant(model, f"ints_{values}", np.array(values, np.int64))

    def node(op_type: str, *values: ir.Value, **attributes: int) -> ir.Value:
        made = ir.node(op_type, values, attributes=attributes)
        graph.append(made)
        return made.outputs[0]

    members = [node("Unsqueeze", node("Neg", value), ints(2)) for value in inputs]
    stack = node("Concat", *members, axis=2)
    stack.shape = ir.Shape(["batch", 3, 2])
    for i, (start, end) in enumerate(picks):
        cut = node("Slice", stack, ints(start), ints(end), ints(axes[0]))
        picked = node("Squeeze", cut, ints(axes[1])) if end == start + 1 else cut
        picked.name, picked.type = f"picked_{i}", kind
        graph.outputs.append(picked)
    return model


def run(model: ir.Model) -> list[np.ndarray]:
    """Outputs for fixed inputs."""
    feeds = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((2, 3), np.float32)}
    return list(ReferenceEvaluator(ir.to_proto(model)).run(None, feeds))


@pytest.mark.parametrize("axes", [(2, 2), (-1, -1), (2, -1)])
def test_picks_become_the_members(axes: tuple[int, int]) -> None:
    model = stacked(((1, 2), (0, 1)), axes)
    expected = run(model)
    assert cancel_stacks(model)
    assert [n.op_type for n in model.graph] == ["Neg", "Neg"]
    assert [v.name for v in model.graph.outputs] == ["picked_0", "picked_1"]
    for got, wanted in zip(run(model), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_slice_of_both_members_stays() -> None:
    model = stacked(((0, 2),))
    assert not cancel_stacks(model)
    assert [n.op_type for n in model.graph][-1] == "Slice"


def test_an_output_is_never_given_two_names() -> None:
    model = stacked(((0, 1), (0, 1)))
    expected = run(model)
    cancel_stacks(model)
    assert [v.name for v in model.graph.outputs] == ["picked_0", "picked_1"]
    for got, wanted in zip(run(model), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
