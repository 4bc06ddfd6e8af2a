"""Move Reshapes to where they are fewer; at one token a node costs more than its arithmetic.

f stands for elementwise functions, with scalars as their other operands, if any; the outer Reshape
undoes the inner one.

1. Split into equal parts along the heads, each part flattened by a Reshape: flatten first, then
   split (one Reshape instead of one a part).
2. ``Reshape(f(Reshape(b)))`` becomes ``f(b)``.
3. ``Reshape(Mul(a, f(Reshape(b))))`` becomes ``Mul(Reshape(a), f(b))``.
"""

from __future__ import annotations

import onnx_ir as ir

from edgelin.export.passes.edit import (
    add_shape,
    constant,
    drop_unused,
    maker,
    only_user,
    replace,
    same_shape,
    scalar,
)

_UNARY = ("QuickGelu", "Sigmoid", "Tanh", "Relu", "Softplus", "Neg", "Exp", "Elu")
_BINARY = ("Add", "Sub", "Mul", "Div")
_HEAD_AXIS = 2


def hoist_reshapes(model: ir.Model) -> bool:
    """Apply the rules to the whole graph until nothing changes."""
    changed = False
    while _sweep(model):
        changed = True
    return changed


def _sweep(model: ir.Model) -> bool:
    """Apply every rule once to every node."""
    changed = False
    for node in list(model.graph):
        if node.domain:
            continue
        if node.op_type == "Split":
            changed |= _flatten_before_split(model, node)
        elif node.op_type == "Reshape":
            changed |= _cancel(model, node) or _reshape_other_operand(model, node)
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
    flat = ir.node("Reshape", [x, add_shape(model, [0, 0, heads * width])])
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


def _cancel(model: ir.Model, node: ir.Node) -> bool:
    """Rule 2."""
    chain = _chain_to_reshape(node.inputs[0], node.outputs[0].shape)
    if chain is None or len(chain) < 2:
        return False
    new = _replay(chain)
    replace(model, node, new, new[-1].outputs)
    return True


def _reshape_other_operand(model: ir.Model, node: ir.Node) -> bool:
    """Rule 3."""
    product, target = node.inputs[0], node.outputs[0].shape
    mul = maker(product, "Mul")
    if product is None or mul is None:
        return False
    if only_user(product) is not node or constant(node.inputs[1]) is None:
        return False
    for index in (0, 1):
        chain = _chain_to_reshape(mul.inputs[index], target)
        other = mul.inputs[1 - index]
        if chain is None or other is None or not same_shape(other.shape, product.shape):
            continue
        new = _replay(chain)
        gate = new[-1].outputs[0] if new else chain[-1].inputs[0]
        flat = ir.node("Reshape", [other, node.inputs[1]])
        flat.outputs[0].shape, flat.outputs[0].type = target, other.type
        outer = ir.node("Mul", [flat.outputs[0], gate])
        replace(model, node, [*new, flat, outer], outer.outputs)
        return True
    return False


def _chain_to_reshape(value: ir.Value | None, target: ir.Shape | None) -> list[ir.Node] | None:
    """The elementwise nodes from ``value`` back to a Reshape of a ``target``, that one last."""
    chain: list[ir.Node] = []
    while value is not None and only_user(value) is not None:
        node = value.producer()
        if node is None:
            return None
        chain.append(node)
        if node.op_type == "Reshape" and not node.domain:
            source = node.inputs[0]
            return chain if source is not None and same_shape(source.shape, target) else None
        at = _tensor_operand(node)
        if at is None:
            return None
        value = node.inputs[at]
    return None


def _tensor_operand(node: ir.Node) -> int | None:
    """Index of the one input of an elementwise node that is no scalar constant, or None."""
    if node.op_type in _UNARY:
        return 0
    if node.op_type in _BINARY and not node.domain:
        scalars = [scalar(value) is not None for value in node.inputs]
        if scalars.count(True) == 1:
            return scalars.index(False)
    return None


def _replay(chain: list[ir.Node]) -> list[ir.Node]:
    """The elementwise nodes of a chain again, in order, on what its Reshape reads."""
    x = source = chain[-1].inputs[0]
    assert x is not None and source is not None
    new = []
    for node in reversed(chain[:-1]):
        inputs = list(node.inputs)
        at = _tensor_operand(node)
        assert at is not None
        inputs[at] = x
        again = ir.node(node.op_type, inputs, attributes=node.attributes, domain=node.domain)
        again.outputs[0].shape, again.outputs[0].type = source.shape, source.type
        x = again.outputs[0]
        new.append(again)
    return new
