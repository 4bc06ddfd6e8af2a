"""What the passes share: reading constants, adding them, and swapping nodes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


def constant(value: ir.Value | None) -> npt.NDArray[np.generic] | None:
    """Content of an initializer that no caller can override, else None."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def scalar(value: ir.Value | None) -> float | None:
    """A constant of one element as a float, else None."""
    array = constant(value)
    return None if array is None or array.size != 1 else float(array.item())


def add_constant(model: ir.Model, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    """An initializer with this content; one of the same name and content is reused."""
    known = model.graph.initializers.get(name)
    if known is not None:
        found = constant(known)
        if found is not None and _same(found, array):
            return known
        raise ValueError(f"initializer {name!r} exists with another content")
    value = ir.Value(
        name=name,
        shape=ir.Shape(array.shape),
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        const_value=ir.Tensor(array, name=name),
    )
    model.graph.register_initializer(value)
    return value


def _same(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> bool:
    """Whether both hold the same bits, so that a NaN is equal to itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.tobytes() == other.tobytes()


def add_shape(model: ir.Model, sizes: Sequence[int]) -> ir.Value:
    """The constant shape of a Reshape."""
    name = "shape_" + "_".join(str(size) for size in sizes).replace("-", "m")
    return add_constant(model, name, np.array(sizes, np.int64))


def same_shape(one: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether both shapes are known, axis by axis, and equal."""
    if one is None or other is None or one != other:
        return False
    return all(isinstance(size, int) or size.value is not None for size in one)


def maker(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The standard operator of this type that makes ``value``, or None when another does."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def only_user(value: ir.Value) -> ir.Node | None:
    """The node that alone reads ``value``, or None when there are others or it is an output."""
    nodes = {use.node for use in value.uses()}
    return next(iter(nodes)) if len(nodes) == 1 and not value.is_graph_output() else None


def replace(
    model: ir.Model, node: ir.Node, new_nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]
) -> None:
    """Put ``new_nodes`` where ``node`` stands; ``outputs`` take over its names, shapes and uses."""
    for old, new in zip(node.outputs, outputs, strict=True):
        if new.shape is None:
            new.shape = old.shape
        if new.type is None:
            new.type = old.type
        if new.producer() in new_nodes:
            new.name = old.name
    model.graph.insert_before(node, new_nodes)
    ir.convenience.replace_all_uses_with(node.outputs, outputs, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def bypass(model: ir.Model, node: ir.Node, source: ir.Value) -> bool:
    """Let ``source`` take the place of the node's output; says whether it could.

    A graph output keeps its name. It cannot be an input or initializer, or an output twice.
    """
    if node.outputs[0].is_graph_output():
        if source.producer() is None or source.is_graph_output():
            return False
        source.name = node.outputs[0].name
    replace(model, node, [], [source])
    return True


def drop_unused(model: ir.Model) -> bool:
    """Remove nodes and initializers that nothing reads; says whether there were any."""
    graph, changed = model.graph, False
    for node in reversed(list(graph)):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)
            changed = True
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
            del graph.initializers[name]
            changed = True
    return changed
