"""``x * Sigmoid(x)`` becomes com.microsoft QuickGelu with alpha 1: one node instead of two."""

from __future__ import annotations

import onnx_ir as ir

from edgelin.export.passes.edit import drop_unused, replace


def fuse_silu(model: ir.Model) -> bool:
    """Fuse every SiLU."""
    changed = False
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for x, gate in (node.inputs, tuple(reversed(node.inputs))):
            sigmoid = gate.producer() if gate is not None else None
            if sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.inputs[0] is x:
                new = ir.node("QuickGelu", [x], attributes={"alpha": 1.0}, domain="com.microsoft")
                replace(model, node, [new], new.outputs)
                changed = True
                break
    return drop_unused(model) or changed
