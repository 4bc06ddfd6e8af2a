"""Cut the hidden states to the last positions before the head, by ``num_logits_to_keep``.

``num_logits_to_keep`` is an int64 scalar initializer that is a graph input too, so that a caller
may override its default 1. The Slice starts at minus that number: 0 starts at 0 and keeps all, and
a number above T is clamped by Slice itself. With ``lengths`` the positions are counted from the end
of every row: the Slice cuts the numbers of the positions, and a GatherND takes these, less what a
row lacks to T.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.export.passes.edit import add_constant, replace

NAME = "num_logits_to_keep"
_DOMAIN = "edgelin"


def select_logits(model: ir.Model) -> bool:
    """Turn every ``edgelin::keep_last`` into a Slice; the positions kept are axis ``kept``."""
    markers = [n for n in model.graph if n.domain == _DOMAIN and n.op_type == "keep_last"]
    for node in markers:
        hidden, *lengths = node.inputs
        if lengths and lengths[0] is not None:
            nodes = _from_the_ends(model, hidden, lengths[0])
        else:
            nodes = _cut(model, hidden, axis=1)
        kept = nodes[-1].outputs[0]
        assert node.outputs[0].shape is not None
        kept.shape = ir.Shape(["batch", "kept", *list(node.outputs[0].shape)[2:]])
        replace(model, node, nodes, [kept])
        _rename_time(kept)
    return bool(markers)


def _cut(model: ir.Model, x: ir.Value | None, *, axis: int) -> list[ir.Node]:
    """The last positions of an axis."""
    start = ir.node("Mul", [_keep(model), add_constant(model, "minus_one", np.array([-1]))])
    end = add_constant(model, "slice_end", np.array([np.iinfo(np.int64).max]))
    axes = add_constant(model, ("batch_axis", "time_axis")[axis], np.array([axis]))
    return [start, ir.node("Slice", [x, start.outputs[0], end, axes])]


def _from_the_ends(model: ir.Model, hidden: ir.Value | None, lengths: ir.Value) -> list[ir.Node]:
    """The last positions of every row."""
    nodes: list[ir.Node] = []

    def op(op_type: str, *inputs: ir.Value | None, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op_type, list(inputs), attributes=attributes))
        return nodes[-1].outputs[0]

    zero, one = (add_constant(model, f"scalar_{i}", np.array(i)) for i in (0, 1))
    time = op("Shape", model.graph.inputs[0], start=1, end=2)
    axis = add_constant(model, "time_axis", np.array([1]))
    nodes += _cut(model, op("Range", zero, op("Squeeze", time), one), axis=0)
    positions = nodes[-1].outputs[0]
    # all positions (0) are left in their places
    lacking = op("Mul", op("Sub", time, lengths), op("Min", _keep(model), one))
    at = op("Max", op("Sub", positions, op("Unsqueeze", lacking, axis)), zero)
    last = add_constant(model, "minus_one", np.array([-1]))
    op("GatherND", hidden, op("Unsqueeze", at, last), batch_dims=1)
    return nodes


def _keep(model: ir.Model) -> ir.Value:
    """The overridable input, made on first use."""
    if NAME in model.graph.initializers:
        return model.graph.initializers[NAME]
    value = ir.Value(
        name=NAME,
        shape=ir.Shape([]),
        type=ir.TensorType(ir.DataType.INT64),
        const_value=ir.Tensor(np.array(1, np.int64), name=NAME),
    )
    model.graph.inputs.append(value)
    model.graph.register_initializer(value)
    return value


def _rename_time(kept: ir.Value) -> None:
    """Name the time axis ``kept`` in everything that follows the Slice."""
    pending = list(kept.consumers())
    while pending:
        node = pending.pop()
        for output in node.outputs:
            shape = output.shape
            if shape is not None and len(shape) > 1 and shape[1] == ir.SymbolicDim("time"):
                output.shape = ir.Shape([shape[0], "kept", *list(shape)[2:]])
                pending.extend(output.consumers())
