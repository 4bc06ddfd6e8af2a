"""Taking one tensor back out of a stack of tensors is that tensor.

A complex state crosses a recurrence's boundary as (re, im) pairs on a last axis, while a bundle has
one tensor for each part. Interleaving them and pulling them apart again would cost more than the
recurrence's own step.
"""

from __future__ import annotations

import onnx_ir as ir

from edgelin.export.passes.edit import constant, drop_unused, replace


def cancel_stacks(model: ir.Model) -> bool:
    """Replace ``Squeeze(Slice(Concat(Unsqueeze(x), ...)))`` by the x that it picks."""
    changed = False
    for node in list(model.graph):
        source = _picked(node)
        if source is None:
            continue
        if node.outputs[0].is_graph_output():
            if source.producer() is None or source.is_graph_output():
                continue  # it would be an input or initializer, or an output twice
            source.name = node.outputs[0].name
        replace(model, node, [], [source])
        changed = True
    drop_unused(model)
    return changed


def _picked(squeeze: ir.Node) -> ir.Value | None:
    """The tensor that a Squeeze of one slice of a stack gives, or None."""
    cut = _producer(squeeze, "Squeeze", "Slice")
    stack = None if cut is None else _producer(cut, "Slice", "Concat")
    if cut is None or stack is None:
        return None
    members = [value.producer() if value is not None else None for value in stack.inputs]
    if not all(m is not None and m.op_type == "Unsqueeze" for m in members):
        return None
    output = stack.outputs[0]
    rank = len(output.shape) if output.shape is not None else None
    start, end, *rest = (_number(value) for value in cut.inputs[1:])
    axes = {
        _axis(value, rank)
        for value in (
            stack.attributes.get_int("axis"),
            *rest[:1],
            _number(squeeze.inputs[1]) if len(squeeze.inputs) > 1 else None,
            *(_number(m.inputs[1]) for m in members if m is not None),
        )
    }
    if None in axes or len(axes) > 1 or len(rest) == 0 or rest[1:] not in ([], [1]):
        return None
    if start is None or end != start + 1 or not 0 <= start < len(members):
        return None
    member = members[start]
    return None if member is None else member.inputs[0]


def _producer(node: ir.Node, op_type: str, source_type: str) -> ir.Node | None:
    """The node behind the first input, if both are of the given types."""
    if node.op_type != op_type or node.inputs[0] is None:
        return None
    source = node.inputs[0].producer()
    return source if source is not None and source.op_type == source_type else None


def _number(value: ir.Value | None) -> int | None:
    """A constant of one element, else None."""
    array = constant(value)
    return None if array is None or array.size != 1 else int(array.item())


def _axis(axis: int | None, rank: int | None) -> int | None:
    """Counted from the front, or None where that is not known."""
    if axis is None or axis >= 0 or rank is None:
        return axis if axis is None or axis >= 0 else None
    return axis + rank
