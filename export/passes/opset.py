"""Stamp opset and file version, after checking that every node exists in that opset unchanged.

The trace is written for opset 23. Most operators did not change since 21, so that the number in the
header can simply be lowered; 27 only adds LinearAttention and CausalConvWithState, which the fused
translations write as com.microsoft operators of the same layout.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

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
            node.domain = ""
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
