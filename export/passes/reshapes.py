"""Reshape clean-up: constant shapes, no detours, no transposes or casts that do nothing.

Rules, repeated until nothing changes:

1. The shape of a Reshape is made constant from the known shapes: 0 (copy) for an axis that keeps
   its place, a number where it is known, -1 for the one that is left. Shape, Gather and Concat
   nodes that computed it fall away.
2. Reshape(Reshape(x)) reads x itself, where every copied axis of the second is a copy of x's.
3. A Reshape, Expand, Cast, Transpose or Identity that changes nothing is removed.
4. Transpose(Transpose(x)) becomes one Transpose.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.export.passes.edit import (
    add_shape,
    bypass,
    constant,
    drop_unused,
    maker,
    same_shape,
)


def clean_reshapes(model: ir.Model) -> bool:
    """Apply the four rules to the whole graph."""
    changed = False
    while any([_sweep(model), drop_unused(model)]):
        changed = True
    return changed


def _sweep(model: ir.Model) -> bool:
    """Apply every rule once to every node."""
    changed = False
    for node in list(model.graph):
        if node.domain or not node.inputs or node.inputs[0] is None:
            continue
        if node.op_type == "Reshape":
            changed |= _constant_shape(model, node)
            changed |= _skip_reshape(node)
        elif node.op_type == "Transpose":
            changed |= _skip_transpose(node)
        if _does_nothing(node):
            changed |= bypass(model, node, node.inputs[0])
    return changed


def _constant_shape(model: ir.Model, node: ir.Node) -> bool:
    """Rule 1."""
    before, after = node.inputs[0], node.outputs[0]
    target = node.inputs[1]
    assert before is not None and target is not None
    known = constant(target)
    if known is not None and not node.attributes.get_int("allowzero", 0):
        return False
    if before.shape is None or after.shape is None:
        return False
    spec: list[int] = []
    for axis, size in enumerate(after.shape):
        same = axis < len(before.shape) and before.shape[axis] == size
        if isinstance(size, int):
            spec.append(size)
        elif same and size.value is not None:
            spec.append(0)
        else:
            spec.append(-1)
    if spec.count(-1) > 1:
        return False
    node.replace_input_with(1, add_shape(model, spec))
    node.attributes.pop("allowzero", None)
    return True


def _skip_reshape(node: ir.Node) -> bool:
    """Rule 2."""
    first = maker(node.inputs[0], "Reshape")
    if first is None:
        return False
    spec, inner = constant(node.inputs[1]), constant(first.inputs[1])
    source = first.inputs[0]
    if spec is None or inner is None or source is None:
        return False
    if first.attributes.get_int("allowzero", 0) or node.attributes.get_int("allowzero", 0):
        return False
    for axis in np.flatnonzero(spec == 0):
        if axis >= inner.size or inner[axis] != 0:
            return False
    node.replace_input_with(0, source)
    return True


def _skip_transpose(node: ir.Node) -> bool:
    """Rule 4."""
    first = maker(node.inputs[0], "Transpose")
    if first is None:
        return False
    outer, inner = node.attributes.get_ints("perm"), first.attributes.get_ints("perm")
    source = first.inputs[0]
    if source is None or not outer or not inner:
        return False
    node.replace_input_with(0, source)
    node.attributes["perm"] = ir.AttrInt64s("perm", [inner[axis] for axis in outer])
    return True


def _does_nothing(node: ir.Node) -> bool:
    """Rule 3."""
    before, after = node.inputs[0], node.outputs[0]
    assert before is not None
    if node.op_type == "Identity":
        return True
    if node.op_type == "Cast":
        return before.dtype is not None and before.dtype == node.attributes.get_int("to", 0)
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm")
        return perm is not None and list(perm) == sorted(perm)
    if node.op_type in ("Reshape", "Expand"):
        return same_shape(before.shape, after.shape) or (
            node.op_type == "Reshape" and _keeps(constant(node.inputs[1]), before)
        )
    return False


def _keeps(spec: np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None, value: ir.Value) -> bool:
    """Whether a constant Reshape leaves a value of known shape as it is."""
    if spec is None or value.shape is None or spec.size != len(value.shape):
        return False
    moved = [axis for axis, size in enumerate(spec) if size not in (0, value.shape[axis])]
    return not moved or (len(moved) == 1 and spec[moved[0]] == -1)
