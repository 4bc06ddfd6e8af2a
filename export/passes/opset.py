"""Stamp opset and file version, after checking that every node exists in that opset unchanged.

The trace is written for opset 23. Most operators did not change since 21, so that the number in the
header can simply be lowered; 27 only adds LinearAttention and CausalConvWithState, which the fused
translations write as com.microsoft operators of the same layout. One thing the standard leaves out:
a key head of LinearAttention serves one head of values, not several.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from edgelin.export.passes.edit import add_constant, add_shape
from edgelin.export.profiles import Profile

_STANDARDISED = ("LinearAttention", "CausalConvWithState")
# onnxruntime serves it in the default domain, though no ONNX opset has it.
_RUNTIME_OWN = ("SimplifiedLayerNormalization",)


def set_opset(model: ir.Model, profile: Profile) -> bool:
    """Set the opset of the profile.

    Raises:
        ValueError: A node's operator is not in that opset, which is a mistake of the passes.
    """
    imports = {"": profile.opset}
    for node in model.graph:
        if not profile.vendor_ops and node.op_type in _STANDARDISED:
            _standardise(model, node)
        if node.domain:
            imports[node.domain] = 1
        elif node.op_type not in _RUNTIME_OWN:
            onnx.defs.get_schema(node.op_type, profile.opset, "")
        node.version = None
    if "edgelin" in imports:
        left = sorted({n.op_type for n in model.graph if n.domain == "edgelin"})
        raise ValueError(f"nodes without a translation: {', '.join(left)}")
    model.graph.opset_imports.clear()
    model.graph.opset_imports.update(imports)
    model.ir_version = profile.ir_version
    return True


def _standardise(model: ir.Model, node: ir.Node) -> None:
    """Make a com.microsoft node one of ai.onnx; queries and keys are repeated where it needs it."""
    node.domain = ""
    if node.op_type != "LinearAttention":
        return
    groups, heads = (node.attributes.get_int(name) for name in ("q_num_heads", "kv_num_heads"))
    if groups == heads:
        return
    by_head, flat = add_shape(model, (0, 0, groups, -1)), add_shape(model, (0, 0, -1))
    places = np.arange(heads, dtype=np.int64) * groups // heads
    index = add_constant(model, f"heads_{groups}_for_{heads}", places)
    for i, x in enumerate(node.inputs[:2]):
        split = ir.node("Reshape", [x, by_head])
        repeated = ir.node("Gather", [split.outputs[0], index], attributes={"axis": 2})
        joined = ir.node("Reshape", [repeated.outputs[0], flat])
        model.graph.insert_before(node, [split, repeated, joined])
        node.replace_input_with(i, joined.outputs[0])
    node.attributes["q_num_heads"] = ir.AttrInt64("q_num_heads", heads)
