"""Compute nodes that read constants only, and lift Constant nodes to initializers.

What the recurrences' builders leave (a decay table, a reshaped weight) is worked out once here, not
in every session. Shape-like results are small; a result may not be larger than ``_LIMIT`` bytes
more than its inputs, so that no Expand of a scalar becomes megabytes of file.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from edgelin.export.passes.edit import add_constant, constant, replace

_LIMIT = 1 << 16


def fold(model: ir.Model) -> bool:
    """Replace initializer-only nodes of standard operators by initializers."""
    changed = False
    for node in list(model.graph):
        arrays = [constant(value) for value in node.inputs if value is not None]
        known = [array for array in arrays if array is not None]
        if node.domain or len(known) < len(arrays) or len(node.outputs) != 1:
            continue
        result = _evaluate(model, node)
        if result.nbytes > sum(array.nbytes for array in known) + _LIMIT:
            continue
        output = node.outputs[0]
        if output.is_graph_output():
            continue
        replace(model, node, [], [add_constant(model, f"{output.name}_value", result)])
        changed = True
    return changed


def _evaluate(model: ir.Model, node: ir.Node) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Run one node in onnx's reference implementation."""
    proto = ir.serde.serialize_node(node)
    inputs = {v.name: constant(v) for v in node.inputs if v is not None}
    graph = onnx.helper.make_graph(
        [proto],
        "fold",
        [],
        [onnx.helper.make_empty_tensor_value_info(proto.output[0])],
        [onnx.numpy_helper.from_array(array, name) for name, array in inputs.items()],
    )
    opset = onnx.helper.make_opsetid("", model.graph.opset_imports[""])
    lone = onnx.helper.make_model(graph, opset_imports=[opset])
    return np.asarray(ReferenceEvaluator(lone).run(None, {})[0])
