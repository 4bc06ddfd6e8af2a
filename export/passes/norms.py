"""RMSNormalization (opset 23) in the operators that a profile may use.

``fuse_norms``: onnxruntime's SimplifiedLayerNormalization, and where the input is a sum of two
tensors of one shape (the residual), com.microsoft SkipSimplifiedLayerNormalization, which gives the
sum as well. ``decompose_norms``: x / sqrt(mean(x^2) + eps) * weight in standard operators, in the
order of nodes that onnxruntime recognises and fuses by itself.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.export.passes.edit import add_constant, drop_unused, replace, same_shape


def fuse_norms(model: ir.Model) -> bool:
    """Write every RMSNormalization with onnxruntime's own operators."""
    norms = _norms(model)
    for node in norms:
        x, weight = node.inputs[0], node.inputs[1]
        assert x is not None
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        total = x.producer()
        if total is not None and _is_residual_sum(total):
            fused = ir.node(
                "SkipSimplifiedLayerNormalization",
                [*total.inputs, weight],
                attributes={"epsilon": epsilon},
                domain="com.microsoft",
                num_outputs=4,
            )
            fused.outputs[1].name = fused.outputs[2].name = ""
            replace(model, total, [fused], [fused.outputs[3]])
            replace(model, node, [], [_named_after(fused.outputs[0], node.outputs[0])])
        else:
            new = ir.node(
                "SimplifiedLayerNormalization",
                [x, weight],
                attributes={"axis": -1, "epsilon": epsilon, "stash_type": 1},
            )
            replace(model, node, [new], new.outputs)
    return drop_unused(model) or bool(norms)


def decompose_norms(model: ir.Model) -> bool:
    """Write every RMSNormalization with standard operators of opset 21."""
    norms = _norms(model)
    for node in norms:
        x, weight = node.inputs[0], node.inputs[1]
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        two = add_constant(model, "norm_two", np.array(2, np.float32))
        axes = add_constant(model, "norm_axes", np.array([-1], np.int64))
        eps = add_constant(model, f"norm_eps_{epsilon:g}", np.array(epsilon, np.float32))
        square = ir.node("Pow", [x, two])
        mean = ir.node("ReduceMean", [square.outputs[0], axes], attributes={"keepdims": 1})
        shifted = ir.node("Add", [mean.outputs[0], eps])
        root = ir.node("Sqrt", [shifted.outputs[0]])
        unit = ir.node("Div", [x, root.outputs[0]])
        scaled = ir.node("Mul", [unit.outputs[0], weight])
        replace(model, node, [square, mean, shifted, root, unit, scaled], scaled.outputs)
    return bool(norms)


def _norms(model: ir.Model) -> list[ir.Node]:
    """All RMSNormalization nodes; the model uses them over the last axis only."""
    norms = [n for n in model.graph if n.op_type == "RMSNormalization" and not n.domain]
    for node in norms:
        rank = len(node.inputs[0].shape or ()) if node.inputs[0] is not None else 0
        if node.attributes.get_int("axis", -1) not in (-1, rank - 1):
            raise ValueError(f"RMSNormalization over more than the last axis: {node.name}")
    return norms


def _is_residual_sum(node: ir.Node) -> bool:
    """Whether a node adds two tensors of one shape ``[batch, time, width]``."""
    if node.op_type != "Add" or node.domain:
        return False
    left, right = (value.shape if value is not None else None for value in node.inputs)
    return left is not None and same_shape(left, right) and len(left) == 3


def _named_after(new: ir.Value, old: ir.Value) -> ir.Value:
    """Give a value the name, shape and type of the one that it replaces."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    return new
