"""Move Reshapes to where they are fewer; at one token a node costs more than its arithmetic.

1. Split into equal parts along the heads, each part flattened by a Reshape: flatten first, then
   split (one Reshape instead of one a part).
2. ``Reshape(Mul(a, f(Reshape(b))))``, where the outer Reshape undoes the inner one and f is an
   elementwise function: ``Mul(Reshape(a), f(b))``.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.export.passes.edit import add_constant, constant, drop_unused, only_user, replace

_UNARY = ("QuickGelu", "Sigmoid", "Tanh", "Relu", "Softplus", "Neg", "Exp")
_HEAD_AXIS = 2


def hoist_reshapes(model: ir.Model) -> bool:
    """Apply both rules to the whole graph."""
    changed = False
    for node in list(model.graph):
        if node.domain:
            continue
        if node.op_type == "Split":
            changed |= _flatten_before_split(model, node)
        elif node.op_type == "Reshape":
            changed |= _reshape_other_operand(model, node)
    return drop_unused(model) or changed


def _flatten_before_split(model: ir.Model, node: ir.Node) -> bool:
    """Rule 1."""
    x = node.inputs[0]
    if x is None or len(node.inputs) > 1 or node.attributes.get_int("axis", 0) != _HEAD_AXIS:
        return False
    if x.shape is None or len(x.shape) != 4:
        return False
    heads, width = x.shape[2], x.shape[3]
    if not isinstance(heads, int) or not isinstance(width, int) or heads % len(node.outputs):
        return False
    reshapes = [only_user(output) for output in node.outputs]
    part = heads * width // len(node.outputs)
    for reshape in reshapes:
        if reshape is None or reshape.op_type != "Reshape" or reshape.domain:
            return False
        spec = constant(reshape.inputs[1])
        if spec is None or spec.tolist() not in ([0, 0, part], [0, 0, -1]):
            return False
    flat = ir.node("Reshape", [x, _shape(model, [0, 0, heads * width])])
    flat.outputs[0].shape = ir.Shape([x.shape[0], x.shape[1], heads * width])
    flat.outputs[0].type = x.type
    split = ir.node(
        "Split",
        [flat.outputs[0]],
        attributes={"axis": _HEAD_AXIS, "num_outputs": len(node.outputs)},
        num_outputs=len(node.outputs),
    )
    model.graph.insert_before(node, [flat, split])
    for reshape, new in zip(reshapes, split.outputs, strict=True):
        assert reshape is not None
        new.shape = ir.Shape([x.shape[0], x.shape[1], part])
        new.type = x.type
        replace(model, reshape, [], [new])
    return True


def _reshape_other_operand(model: ir.Model, node: ir.Node) -> bool:
    """Rule 2."""
    product = node.inputs[0]
    mul = product.producer() if product is not None else None
    if product is None or mul is None or mul.op_type != "Mul" or mul.domain:
        return False
    if only_user(product) is not node or constant(node.inputs[1]) is None:
        return False
    target = node.outputs[0].shape
    for index in (0, 1):
        chain = _chain_to_reshape(mul.inputs[index])
        other = mul.inputs[1 - index]
        if chain is None or other is None or target is None or other.shape != product.shape:
            continue
        inner = chain[-1].inputs[0]
        if inner is None or inner.shape != target:
            continue
        x = inner
        new = []
        for unary in reversed(chain[:-1]):
            unary = ir.node(unary.op_type, [x], attributes=unary.attributes, domain=unary.domain)
            x = unary.outputs[0]
            x.shape, x.type = target, inner.type
            new.append(unary)
        flat = ir.node("Reshape", [other, node.inputs[1]])
        flat.outputs[0].shape, flat.outputs[0].type = target, other.type
        outer = ir.node("Mul", [flat.outputs[0], x])
        replace(model, node, [*new, flat, outer], outer.outputs)
        return True
    return False


def _chain_to_reshape(value: ir.Value | None) -> list[ir.Node] | None:
    """The elementwise nodes from ``value`` back to a Reshape, that one last, or None."""
    chain: list[ir.Node] = []
    while value is not None and only_user(value) is not None:
        node = value.producer()
        if node is None:
            return None
        chain.append(node)
        if node.op_type == "Reshape" and not node.domain:
            return chain
        if node.op_type not in _UNARY:
            return None
        value = node.inputs[0]
    return None


def _shape(model: ir.Model, sizes: list[int]) -> ir.Value:
    """A constant shape."""
    name = "shape_" + "_".join(str(size) for size in sizes)
    return add_constant(model, name, np.array(sizes, np.int64))
