"""Keys and queries that several heads share go into com.microsoft LinearAttention once.

The operator knows fewer heads of queries and keys than of values: each serves as many neighbouring
heads. A model repeats them instead, which every other form of the recurrence needs.
"""

from __future__ import annotations

import onnx_ir as ir

from edgelin.export.passes.edit import add_shape, drop_unused, maker

_AXIS = 2


def share_keys(model: ir.Model) -> bool:
    """Undo ``Split(Reshape(Expand(x)))`` into queries and keys wherever it repeats heads."""
    changed = False
    for node in list(model.graph):
        if node.op_type == "LinearAttention" and node.domain == "com.microsoft":
            changed |= _share(model, node)
    drop_unused(model)
    return changed


def _share(model: ir.Model, node: ir.Node) -> bool:
    """Let one node read what its queries and keys are repetitions of."""
    splits = [maker(value, "Split") for value in node.inputs[:2]]
    split = splits[0]
    if split is None or split is not splits[1] or len(split.outputs) != 2:
        return False
    if split.attributes.get_int("axis", 0) != _AXIS or len(split.inputs) > 1:
        return False
    joined = maker(split.inputs[0], "Reshape")
    repeated = None if joined is None else maker(joined.inputs[0], "Expand")
    if repeated is None:
        return False
    sizes = [_sizes(value) for value in (repeated.inputs[0], repeated.outputs[0])]
    if sizes[0] is None or sizes[1] is None:
        return False
    (groups, one, width), (same, copies, _) = sizes[0], sizes[1]
    heads = node.attributes.get_int("q_num_heads")
    if one != 1 or same != groups or groups % 2 or groups * copies != 2 * heads:
        return False
    flat = ir.node("Reshape", [repeated.inputs[0], add_shape(model, [0, 0, groups * width])])
    apart = ir.node(
        "Split",
        [flat.outputs[0]],
        attributes={"axis": _AXIS, "num_outputs": 2},
        num_outputs=2,
    )
    _describe(flat.outputs[0], repeated.inputs[0], groups * width)
    for index, (old, new) in enumerate(zip(split.outputs, apart.outputs, strict=True)):
        _describe(new, repeated.inputs[0], groups * width // 2)
        for place in (0, 1):
            if node.inputs[place] is old:
                node.replace_input_with(place, apart.outputs[index])
    model.graph.insert_before(node, [flat, apart])
    node.attributes["q_num_heads"] = ir.AttrInt64("q_num_heads", groups // 2)
    return True


def _sizes(value: ir.Value | None) -> tuple[int, int, int] | None:
    """The last three sizes of ``[batch, time, groups, copies, width]``; None: another shape."""
    if value is None or value.shape is None or len(value.shape) != 5:
        return None
    groups, copies, width = list(value.shape)[2:]
    if isinstance(groups, int) and isinstance(copies, int) and isinstance(width, int):
        return groups, copies, width
    return None


def _describe(new: ir.Value, like: ir.Value | None, width: int) -> None:
    """Set type and shape ``[batch, time, width]``."""
    assert like is not None and like.shape is not None
    new.type, new.shape = like.type, ir.Shape([like.shape[0], like.shape[1], width])
