"""Cut the hidden states to the last positions before the head, by ``num_logits_to_keep``.

``num_logits_to_keep`` is an int64 scalar initializer that is a graph input too, so that a caller
may override its default 1. The Slice starts at minus that number: 0 starts at 0 and keeps all, and
a number above T is clamped by Slice itself.
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
        start = ir.node("Mul", [_keep(model), add_constant(model, "minus_one", np.array([-1]))])
        cut = ir.node(
            "Slice",
            [
                node.inputs[0],
                start.outputs[0],
                add_constant(model, "slice_end", np.array([np.iinfo(np.int64).max])),
                add_constant(model, "time_axis", np.array([1])),
            ],
        )
        kept = cut.outputs[0]
        assert node.outputs[0].shape is not None
        kept.shape = ir.Shape(["batch", "kept", *list(node.outputs[0].shape)[2:]])
        replace(model, node, [start, cut], [kept])
        _rename_time(kept)
    return bool(markers)


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
