"""Let ``lengths`` be left out of a call: every row is as long as the call then.

The input becomes an int64 initializer that a caller may override, like ``num_logits_to_keep``. Its
default ``[1]``, no end at all, is cut to T and spread over the rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.export.contract import LENGTHS
from edgelin.export.passes.edit import add_constant


def default_lengths(model: ir.Model) -> bool:
    """Give the input ``lengths`` its default, if the graph has one."""
    found = next((value for value in model.graph.inputs if value.name == LENGTHS), None)
    if found is None:
        return False
    # A size of its own: onnxruntime would take the default, one number, for one a row.
    found.shape = ir.Shape(["batch_or_one"])
    found.const_value = ir.Tensor(np.array([np.iinfo(np.int64).max]), name=LENGTHS)
    model.graph.register_initializer(found)
    source = model.graph.inputs[0]
    batch = ir.node("Shape", [source], attributes={"start": 0, "end": 1})
    time = ir.node("Shape", [source], attributes={"start": 1, "end": 2})
    cut = ir.node("Min", [found, time.outputs[0]])
    least = ir.node("Max", [cut.outputs[0], add_constant(model, "zero_length", np.array([0]))])
    rows = ir.node("Expand", [least.outputs[0], batch.outputs[0]])
    rows.outputs[0].shape, rows.outputs[0].type = ir.Shape(["batch"]), found.type
    for node, index in list(found.uses()):
        node.replace_input_with(index, rows.outputs[0])
    cut.replace_input_with(0, found)
    model.graph.insert_before(model.graph[0], [batch, time, cut, least, rows])
    return True
