"""``x * Sigmoid(x)`` as one com.microsoft QuickGelu with alpha 1, and back.

The passes between see one elementwise node; profiles without vendor operators expand it again.
"""

from __future__ import annotations

import onnx_ir as ir

from edgelin.export.passes.edit import drop_unused, maker, replace


def fuse_silu(model: ir.Model) -> bool:
    """Fuse every SiLU."""
    changed = False
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for x, gate in (node.inputs, tuple(reversed(node.inputs))):
            sigmoid = maker(gate, "Sigmoid")
            if sigmoid is not None and sigmoid.inputs[0] is x:
                new = ir.node("QuickGelu", [x], attributes={"alpha": 1.0}, domain="com.microsoft")
                replace(model, node, [new], new.outputs)
                changed = True
                break
    return drop_unused(model) or changed


def expand_silu(model: ir.Model) -> bool:
    """Write every QuickGelu of :func:`fuse_silu` as Sigmoid and Mul."""
    fused = [n for n in model.graph if n.op_type == "QuickGelu" and n.domain == "com.microsoft"]
    for node in fused:
        sigmoid = ir.node("Sigmoid", [node.inputs[0]])
        product = ir.node("Mul", [node.inputs[0], sigmoid.outputs[0]])
        replace(model, node, [sigmoid, product], product.outputs)
    return bool(fused)
