"""Taking one tensor back out of a stack of tensors is that tensor.

A complex state crosses a recurrence's boundary as (re, im) pairs on a last axis, while a bundle has
one tensor for each part. Interleaving them and pulling them apart again would cost more than the
recurrence's own step.
"""

from __future__ import annotations

import onnx_ir as ir

from edgelin.export.passes.edit import bypass, drop_unused, maker, scalar


def cancel_stacks(model: ir.Model) -> bool:
    """Replace ``Squeeze(Slice(Concat(Unsqueeze(x), ...)))`` by the x that it picks."""
    changed = False
    for node in list(model.graph):
        source = _picked(node)
        if source is not None:
            changed |= bypass(model, node, source)
    drop_unused(model)
    return changed


def _picked(squeeze: ir.Node) -> ir.Value | None:
    """The tensor that a Squeeze of one slice of a stack gives, or None."""
    cut = maker(squeeze.inputs[0], "Slice") if squeeze.op_type == "Squeeze" else None
    stack = None if cut is None else maker(cut.inputs[0], "Concat")
    if cut is None or stack is None:
        return None
    members = [maker(value, "Unsqueeze") for value in stack.inputs]
    if None in members:
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


def _number(value: ir.Value | None) -> int | None:
    """A constant of one element as an integer, else None."""
    number = scalar(value)
    return None if number is None else int(number)


def _axis(axis: int | None, rank: int | None) -> int | None:
    """Counted from the front, or None where that is not known."""
    if axis is None or axis >= 0 or rank is None:
        return axis if axis is None or axis >= 0 else None
    return axis + rank
