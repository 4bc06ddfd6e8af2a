"""A Split of what a Split gives, along the same axis, becomes part of the first."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgelin.export.passes.edit import add_constant, maker, only_user, replace


def merge_splits(model: ir.Model) -> bool:
    """Merge until nothing is left to merge; sizes have to be known."""
    changed = False
    while any([_merge(model, node) for node in list(model.graph)]):
        changed = True
    return changed


def _merge(model: ir.Model, node: ir.Node) -> bool:
    """Merge one Split into the one that makes its input."""
    source = node.inputs[0] if node.op_type == "Split" and not node.domain else None
    first = maker(source, "Split")
    if source is None or first is None or only_user(source) is not node:
        return False
    axis = node.attributes.get_int("axis", 0)
    if axis < 0 or axis != first.attributes.get_int("axis", 0):
        return False
    parts = [p for value in first.outputs for p in (node.outputs if value is source else [value])]
    sizes = [_size(part, axis) for part in parts]
    if None in sizes:
        return False
    name = "split_" + "_".join(map(str, sizes))
    lengths = add_constant(model, name, np.array(sizes, np.int64))
    new = ir.node(
        "Split",
        [first.inputs[0], lengths],
        attributes={"axis": axis},
        num_outputs=len(parts),
    )
    made = dict(zip(parts, new.outputs, strict=True))
    for part, value in made.items():
        value.name, value.type, value.shape = part.name, part.type, part.shape
    replace(model, node, [], [made[part] for part in node.outputs])
    rest = [made.get(value, ir.Value()) for value in first.outputs]
    replace(model, first, [new], rest)
    return True


def _size(value: ir.Value, axis: int) -> int | None:
    """Length along an axis, or None where it is not known."""
    size = None if value.shape is None or len(value.shape) <= axis else value.shape[axis]
    return size if isinstance(size, int) else None
